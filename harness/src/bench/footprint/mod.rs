//! `bench footprint`: what the driver costs a node that only has volumes: memory, the size of its image, and its start.
//!
//! The peer is the deployment that the driver replaces: external-provisioner and external-resizer beside a CSI driver. That driver
//! is the one of this project, which registers itself, so the peer has no node-driver-registrar: its cost would come on top. The
//! memory of both is measured at the same time on one node. The claims belong to our driver, and the sidecars watch all claims and
//! volumes of the cluster, as they always do.

mod registration;
mod run;
mod sizes;

pub(super) use self::run::run;
