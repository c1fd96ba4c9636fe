//! Reconciles PersistentVolumes whose data cannot be reached any more.

pub(crate) mod decision;
#[cfg(test)]
mod model;
mod reconcile;

pub use self::reconcile::NodeLoss;
pub(crate) use self::reconcile::{
    LossReconciler, Lost, LostStorage, POLL_INTERVAL, Witness, is_node_deleted, loss_began,
};
