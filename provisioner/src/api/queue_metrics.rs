//! Metrics of the queues: how many objects wait for a reconciliation, and how long each waited.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kube::Resource;
use kube::runtime::reflector::{Lookup, ObjectRef};
use parking_lot::Mutex;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// An idle process reconciles within a millisecond. Objects wait for seconds if more changed than are reconciled concurrently.
const BUCKETS: [f64; 8] = [0.001, 0.01, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0];

type Labels = [(&'static str, &'static str); 1];

/// The metrics of all queues of the process.
#[derive(Clone, Debug)]
pub(crate) struct QueueMetrics {
    depth: Family<Labels, Gauge>,
    waited: Family<Labels, Histogram, fn() -> Histogram>,
}

impl Default for QueueMetrics {
    fn default() -> Self {
        QueueMetrics {
            depth: Family::default(),
            waited: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
        }
    }
}

impl QueueMetrics {
    /// Returns the queue of a name, which is the value of the label `queue`.
    pub(crate) fn queue(&self, name: &'static str) -> QueueDepth {
        let labels = [("queue", name)];
        QueueDepth(Arc::new(Waiting {
            since: Mutex::default(),
            depth: self.depth.get_or_create_owned(&labels),
            waited: self.waited.get_or_create_owned(&labels),
        }))
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Objects that changed and wait for a reconciliation; each counts once";
        registry.register("queue_depth", help, self.depth.clone());
        let help = "Time from a change of an object to the start of its reconciliation";
        registry.register_with_unit("queue_wait", help, Unit::Seconds, self.waited.clone());
    }
}

/// The objects of one queue that wait for a reconciliation.
#[derive(Clone, Debug)]
pub(crate) struct QueueDepth(Arc<Waiting>);

#[derive(Debug)]
struct Waiting {
    /// When each object entered the queue, by namespace and name.
    since: Mutex<HashMap<(Option<String>, String), Instant>>,
    depth: Gauge,
    waited: Histogram,
}

impl QueueDepth {
    /// Notes that an object entered the queue. An object that waits already keeps its place.
    pub(crate) fn entered<K: Lookup>(&self, object: &ObjectRef<K>) {
        let mut since = self.0.since.lock();
        since.entry(key_of(object)).or_insert_with(Instant::now);
        self.0.depth.set(since.len() as i64);
    }

    /// Notes that the reconciliation of an object starts.
    pub(crate) fn started<K: Resource<DynamicType = ()>>(&self, object: &K) {
        if let Some(since) = self.left(&ObjectRef::from_obj(object)) {
            self.0.waited.observe(since.elapsed().as_secs_f64());
        }
    }

    /// Notes that an object left the queue, and returns when it entered. An object that is reconciled again after a wait was not in it.
    pub(crate) fn left<K: Lookup>(&self, object: &ObjectRef<K>) -> Option<Instant> {
        let mut since = self.0.since.lock();
        let entered = since.remove(&key_of(object));
        self.0.depth.set(since.len() as i64);
        entered
    }
}

fn key_of<K: Lookup>(object: &ObjectRef<K>) -> (Option<String>, String) {
    (object.namespace.clone(), object.name.clone())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use serde_json::json;
    use service::documentation;

    use super::*;
    use crate::testing::fixtures;

    #[test]
    fn waiting_object_counts_once() {
        let metrics = QueueMetrics::default();
        let queue = metrics.queue("claims");
        let claim = |name: &str| fixtures::claim(json!({"metadata": {"name": name}}));
        for name in ["a", "b", "a", "gone"] {
            queue.entered(&ObjectRef::from_obj(&claim(name)));
        }
        queue.started(&claim("a"));
        queue.left(&ObjectRef::<PersistentVolumeClaim>::new("gone").within("shop"));
        // Reconciled again after a back-off.
        queue.started(&claim("a"));
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let text = documentation::page(&registry);
        for line in [r#"queue_depth{queue="claims"} 1"#, r#"queue_wait_seconds_count{queue="claims"} 1"#] {
            assert!(text.contains(&format!("\n{line}\n")), "{line} is not in {text}");
        }
    }
}
