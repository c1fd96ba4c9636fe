//! Reconciles PersistentVolumes whose data cannot be reached any more.

pub(crate) mod decision;
mod reconcile;

pub use self::reconcile::NodeLoss;
pub(crate) use self::reconcile::{LossReconciler, LostStorage, POLL_INTERVAL, is_node_deleted};
