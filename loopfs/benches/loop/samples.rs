//! Times of one measured thing, and the line they are reported in.

use std::time::{Duration, Instant};

/// All runs of `name` with `n` of whatever it may depend on.
#[derive(Debug)]
pub(crate) struct Samples {
    name: &'static str,
    n: usize,
    unit: &'static str,
    microseconds: Vec<f64>,
}

impl Samples {
    pub(crate) fn new(name: &'static str, n: usize) -> Self {
        Self { name, n, unit: "us", microseconds: Vec::new() }
    }

    /// Of work on many devices, the share of one.
    pub(crate) fn per_device(name: &'static str, n: usize) -> Self {
        Self { unit: "us/device", ..Self::new(name, n) }
    }

    pub(crate) fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.push(started.elapsed());
        result
    }

    pub(crate) fn push(&mut self, time: Duration) {
        self.microseconds.push(time.as_secs_f64() * 1e6);
    }

    /// Nothing where nothing was measured.
    pub(crate) fn print(mut self) {
        self.microseconds.sort_by(f64::total_cmp);
        let (Some(median), Some(p99)) = (self.quantile(0.5), self.quantile(0.99)) else { return };
        let Self { name, n, unit, microseconds } = self;
        let runs = microseconds.len();
        println!(
            r#"{{"name":"{name}","n":{n},"unit":"{unit}","median":{median:.3},"p99":{p99:.3},"runs":{runs}}}"#
        );
    }

    /// By the nearest rank.
    fn quantile(&self, share: f64) -> Option<f64> {
        let rank = (share * self.microseconds.len() as f64).ceil() as usize;
        self.microseconds.get(rank.saturating_sub(1)).copied()
    }
}
