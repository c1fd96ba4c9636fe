//! `bench provision`: many concurrent claims on a real cluster, compared with external-provisioner.
//!
//! The peer is external-provisioner and external-resizer, whose work the provisioner does as well, with the
//! CSI controller of this driver. It uses the same node, disk and API server. Both bind through the same
//! kube-controller-manager, and take turns. They differ only in the program that turns claims into volumes.

pub(super) mod contender;
pub(super) mod peer;
mod run;

pub(super) use self::run::run;
