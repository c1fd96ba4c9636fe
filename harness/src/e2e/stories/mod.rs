//! The end-to-end stories, one per file. `catalogue.rs` has their order.

pub(super) mod bad_claims;
pub(super) mod claim_labels;
pub(super) mod clones;
pub(super) mod deletion_in_use;
pub(super) mod driver_restart;
pub(super) mod flow;
pub(super) mod gvisor;
pub(super) mod half_provisioned;
pub(super) mod helm;
pub(super) mod hostile_provisioner;
pub(super) mod hostile_tenant;
pub(super) mod infeasible_resize;
pub(super) mod install;
pub(super) mod kubelet_quotas;
pub(super) mod kubelet_root;
pub(super) mod node;
pub(super) mod node_loss;
pub(super) mod orphans;
pub(super) mod outages;
pub(super) mod power_cut;
pub(super) mod read_only_claims;
pub(super) mod removal;
pub(super) mod retained_volumes;
pub(super) mod second_node;
pub(super) mod snapshots;
pub(super) mod user_namespaces;
