//! The samples of one measurement, and the line that reports them.
#![allow(dead_code, reason = "the benchmarks of csi use a part of it")]

use std::time::{Duration, Instant};

/// The largest number of samples in a report line. A test of two runs for a difference needs no more, and the lines stay short.
const MAX_PRINTED: usize = 200;

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
        Self { name: name.to_owned(), n, unit: "us", microseconds: Vec::new() }
    }

    /// Creates samples in another unit, for work on many devices or inodes.
    pub(crate) fn per(unit: &'static str, name: &str, n: usize) -> Self {
        Self { unit, ..Self::new(name, n) }
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
    pub(crate) fn print(mut self) {
        // Before they are sorted, because the printed samples are spread over the time of the run.
        let samples = self.spread();
        self.microseconds.sort_by(f64::total_cmp);
        let (Some(median), Some(p99)) = (self.quantile(0.5), self.quantile(0.99)) else { return };
        let Self { name, n, unit, microseconds } = self;
        let runs = microseconds.len();
        println!(
            r#"{{"name":"{name}","n":{n},"unit":"{unit}","median":{median:.3},"p99":{p99:.3},"runs":{runs},"samples":[{samples}]}}"#
        );
    }

    /// Returns at most [`MAX_PRINTED`] samples as text, evenly spread over the run.
    fn spread(&self) -> String {
        let stride = self.microseconds.len().div_ceil(MAX_PRINTED).max(1);
        let spread = self.microseconds.iter().step_by(stride);
        spread.map(|time| format!("{time:.3}")).collect::<Vec<_>>().join(",")
    }

    /// Returns a quantile by the nearest-rank method.
    fn quantile(&self, share: f64) -> Option<f64> {
        let rank = (share * self.microseconds.len() as f64).ceil() as usize;
        self.microseconds.get(rank.saturating_sub(1)).copied()
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
