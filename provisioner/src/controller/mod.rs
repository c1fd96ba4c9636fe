//! The role `controller`: duties that concern objects of the whole cluster.
//!
//! Any number of replicas run, and the one that holds the Lease performs the duties. They need no volume store.

pub(crate) mod builtin;
mod health_endpoints;
mod immediate;
pub(crate) mod lease;
mod lost_snapshots;
pub(crate) mod node_loss;
mod pending_claims;
pub(crate) mod process;
mod registered_nodes;
pub(crate) mod unready_nodes;
mod wrong_selections;
