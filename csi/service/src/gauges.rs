//! The registry of one scrape, and gauges that are read once for it.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

type Labelled = Family<[(&'static str, &'static str); 1], Gauge>;

/// Returns the registry for a scrape of a program whose metrics begin with `prefix`. It has the version, which all programs of the
/// workspace share.
#[must_use]
pub fn registry(prefix: &str) -> Registry {
    let mut registry = Registry::with_prefix(prefix);
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "Version of the program", version);
    registry
}

/// Registers current values as gauges.
pub trait Gauges {
    /// Registers a count.
    fn count(&mut self, name: &str, help: &str, value: u64);
    /// Registers counts that differ in the value of one label.
    fn counts(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'static str, u64)>,
    );
    /// Registers a number of bytes. The suffix `_bytes` is appended to the name.
    fn bytes(&mut self, name: &str, help: &str, value: u64);
    /// Registers a duration or time. The suffix `_seconds` is appended to the name.
    fn seconds(&mut self, name: &str, help: &str, value: Duration);
}

impl Gauges for Registry {
    fn count(&mut self, name: &str, help: &str, value: u64) {
        self.register(name, help, whole(value));
    }

    fn counts(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'static str, u64)>,
    ) {
        let family = Labelled::default();
        for (which, value) in values {
            family.get_or_create(&[(label, which)]).set(signed(value));
        }
        self.register(name, help, family);
    }

    fn bytes(&mut self, name: &str, help: &str, value: u64) {
        self.register_with_unit(name, help, Unit::Bytes, whole(value));
    }

    fn seconds(&mut self, name: &str, help: &str, value: Duration) {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value.as_secs_f64());
        self.register_with_unit(name, help, Unit::Seconds, gauge);
    }
}

/// Registers the verdict of the latest check of readiness. [`serve`](crate::serve) does this for each program.
pub fn register_readiness(registry: &mut Registry, ready: bool) {
    let help = "1 if the latest check of /readyz succeeded, else 0; the body of /readyz has the reason";
    registry.count("ready", help, u64::from(ready));
}

fn whole(value: u64) -> Gauge {
    let gauge = Gauge::default();
    gauge.set(signed(value));
    gauge
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
