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
    #[allow(dead_code, reason = "of those who include this file, only benches/loop measures devices")]
    pub(crate) fn per_device(name: &'static str, n: usize) -> Self {
        Self { unit: "us/device", ..Self::new(name, n) }
    }

    /// Of work on a tree, the share of one inode.
    #[allow(dead_code, reason = "of those who include this file, only benches/clone measures trees")]
    pub(crate) fn per_inode(name: &'static str, n: usize) -> Self {
        Self { unit: "us/inode", ..Self::new(name, n) }
    }

    /// Times work on `parts` of what is measured; a run to warm up does not count.
    #[allow(dead_code, reason = "of those who include this file, only benches/clone warms up so")]
    pub(crate) fn share<T>(&mut self, counts: bool, parts: usize, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        if counts {
            self.push(started.elapsed() / parts as u32);
        }
        result
    }

    #[allow(
        dead_code,
        reason = "of those who include this file, only benches/loop measures without warming up"
    )]
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
