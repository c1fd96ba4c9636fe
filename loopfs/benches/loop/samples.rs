//! The samples of one measurement, and the line that reports them.
#![allow(dead_code, reason = "the benchmarks of csi use a part of it")]

use std::time::{Duration, Instant};

/// The times of all runs of measurement `name`. `n` is the quantity on which the time may depend, such as the number of devices.
#[derive(Debug)]
pub(crate) struct Samples {
    name: String,
    n: usize,
    unit: &'static str,
    microseconds: Vec<f64>,
}

impl Samples {
    pub(crate) fn new(name: &str, n: usize) -> Self {
        Self::per("us", name, n)
    }

    /// Creates samples in another unit, for work on many devices or inodes.
    pub(crate) fn per(unit: &'static str, name: &str, n: usize) -> Self {
        Self { name: name.to_owned(), n, unit, microseconds: Vec::new() }
    }

    /// Runs `work` and records its time divided by `parts`. If `counts` is `false`, it records nothing, for a warm-up run.
    pub(crate) fn share<T>(&mut self, counts: bool, parts: usize, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        if counts {
            self.push(started.elapsed() / parts as u32);
        }
        result
    }

    pub(crate) fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.share(true, 1, work)
    }

    pub(crate) fn push(&mut self, time: Duration) {
        self.microseconds.push(time.as_secs_f64() * 1e6);
    }

    /// Prints the report line, or nothing if there are no samples.
    pub(crate) fn print(self) {
        let Self { name, n, unit, microseconds } = self;
        if !microseconds.is_empty() {
            println!(r#"{{"name":"{name}","n":{n},"unit":"{unit}","samples":{microseconds:.3?}}}"#);
        }
    }
}

/// The samples of several measurements with the same `n`, in the order of the report.
pub(crate) struct Series {
    pub(crate) n: usize,
    samples: Vec<Samples>,
}

impl Series {
    pub(crate) fn new(names: &[&str], n: usize) -> Self {
        Self { n, samples: names.iter().map(|name| Samples::new(name, n)).collect() }
    }

    fn of(&mut self, name: &str) -> &mut Samples {
        self.samples.iter_mut().find(|samples| samples.name == name).expect("one of the names")
    }

    pub(crate) fn push(&mut self, name: &str, time: Duration) {
        self.of(name).push(time);
    }

    /// Runs `work` and records its time as one of the measurement `name`.
    pub(crate) fn time<T>(&mut self, name: &str, work: impl FnOnce() -> T) -> T {
        self.of(name).time(work)
    }

    pub(crate) fn print(self) {
        self.samples.into_iter().for_each(Samples::print);
    }
}
