//! What is told in events, counted by reason.

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// All that was told since the process began. What is told again and what no event is written of is counted too.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventCounter(Family<[(&'static str, &'static str); 2], Counter>);

impl EventCounter {
    pub(crate) fn count(&self, type_: &'static str, reason: &'static str) {
        self.0.get_or_create(&[("type", type_), ("reason", reason)]).inc();
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "What was told in events, whether for the first time or again, by the reason of the event";
        registry.register("events", help, self.0.clone());
    }
}
