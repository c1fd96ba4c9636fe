//! Counts event requests by reason.

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// Counter of all event requests since the process started, including repetitions and requests of which no event is written.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventCounter(Family<[(&'static str, &'static str); 2], Counter>);

impl EventCounter {
    /// Counts a request.
    pub(crate) fn count(&self, type_: &'static str, reason: &'static str) {
        self.0.get_or_create(&[("type", type_), ("reason", reason)]).inc();
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Events that were recorded, first occurrences and repetitions, by the reason of the event";
        registry.register("events", help, self.0.clone());
    }
}
