//! `bench burst`: many concurrent claims on one node, compared with external-provisioner without its rate limits.
//!
//! Both contenders are processes of this machine beside a control plane without nodes. Their volumes are in memory, so only the
//! programs and the API server are compared. The provisioner is that of its live tests. The peer is external-provisioner alone, beside
//! a CSI controller of which each call returns at once. They take turns, and only one of them runs at a time.
//!
//! The bench selects the node of each claim, as the scheduler does. kube-controller-manager names the provisioner of each claim before
//! its volume is created, and binds the two. It has no rate limit.
//!
//! The peer has the advantages: the administrator's rights, which the API server neither looks up nor queues, and no processor time of
//! its CSI controller is charged to it. The provisioner has the rights of the manifests.

mod peer;
mod run;

pub(super) use self::run::run;
