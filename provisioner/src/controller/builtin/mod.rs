//! Built-in objects: keeps the cluster objects that the driver needs in the state that a ConfigMap declares.
//!
//! The ConfigMap holds the same manifests that a user applies. The replica that leads watches it and the objects with the labels of
//! its driver. Two replicas that both believe that they lead may repair the same object without harm: each write has the resource
//! version of the decision as a precondition, and each decision is based on the declaration as the API server holds it at that time.
//! Otherwise a replica that has not received a new declaration yet could undo what another has just changed.
//!
//! `docs/decisions/0028-declared-objects.md` gives the reasons.

mod declaration;
mod kinds;
#[cfg(test)]
mod malformed_object_tests;
mod plan;
mod reconciler;

pub(crate) use self::reconciler::{DeclarationSource, REPAIR_DELAY, run};
