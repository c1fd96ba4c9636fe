//! Access to the API server: what this process needs in addition to kube.

pub(crate) mod absence;
pub(crate) mod backoff;
pub(crate) mod client;
pub(crate) mod cluster;
pub(crate) mod connection;
pub(crate) mod events;
pub(crate) mod fair_queue;
pub(crate) mod hash;
pub(crate) mod list;
pub(crate) mod mutation_cache;
pub(crate) mod pages;
pub(crate) mod policies;
pub(crate) mod pruned;
pub(crate) mod queue;
pub(crate) mod queue_metrics;
pub(crate) mod request;
pub(crate) mod traffic;
