//! The parts that stories and benchmarks share: the driver under test as its manifests describe it, claims,
//! pods and their volumes, and the inventory of a node.

pub(crate) mod claim_labels;
pub(crate) mod claims;
pub(crate) mod disturbances;
pub(crate) mod environment;
pub(crate) mod in_use;
pub(crate) mod inventory;
pub(crate) mod manifests;
pub(crate) mod node_debug;
pub(crate) mod pods;
pub(crate) mod projects;
pub(crate) mod rejected_writes;
pub(crate) mod runtime_classes;
pub(crate) mod sizes;
pub(crate) mod snapshots;
pub(crate) mod users;
pub(crate) mod volume_work;
pub(crate) mod workload;
