//! Built-in objects: what the driver needs in the cluster is kept as a ConfigMap declares it.
//!
//! The ConfigMap holds the very manifests that a user applies. Every provisioner watches it and the objects that are labelled as
//! its driver's, so there is no leader and nobody to wait for; that several repair the same is made harmless: each write is under the
//! condition that the object still is what the decision was made on, and each decision is made on the declaration as it is then.
//! A provisioner that has not heard of a new declaration yet could otherwise undo what another has just done about it.

pub(crate) mod declaration;
pub(crate) mod kinds;
pub(crate) mod plan;
mod reconciler;

pub(crate) use self::reconciler::{Source, run};
