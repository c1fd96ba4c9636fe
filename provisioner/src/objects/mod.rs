//! Kubernetes objects as data: names, quantities, conditions. Pure: nothing here calls the API server or the store.

pub(crate) mod claim_status;
pub(crate) mod data_source;
pub(crate) mod identity;
pub(crate) mod loss_policy;
pub(crate) mod ownership;
pub(crate) mod parameters;
pub(crate) mod pv;
pub(crate) mod quantity;
pub(crate) mod refusal;
pub(crate) mod snapshot;
pub(crate) mod topology;
