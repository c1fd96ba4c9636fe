//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use service::{HealthArgs, LogArgs, node_name, socket_path};

use crate::loss::NodeLoss;

/// Provisions volumes of the nodes of a Kubernetes cluster.
#[derive(Debug, Clone, Parser)]
#[command(name = "loopfs-provisioner", version)]
pub struct Args {
    #[command(subcommand)]
    pub role: Role,
}

/// The role of the process.
#[derive(Debug, Clone, Subcommand)]
pub enum Role {
    /// Creates, expands and deletes volumes for the claims of one node. Runs on each node
    Node(NodeArgs),
    /// Performs the duties that concern the whole cluster: selects nodes for claims of classes with volumeBindingMode Immediate,
    /// reconciles volumes of deleted nodes, reports those of nodes that are not ready, and keeps the driver's objects as declared. Of its replicas, one is active
    Controller(ControllerArgs),
    /// Prints PersistentVolumes and claims for the volumes of a node whose cluster was lost
    ///
    /// Reads the output of `loopfs --json store list DIR` from the standard input, and writes a list for `kubectl create -f -`. The
    /// PersistentVolumes have the reclaim policy Retain. Notes on volumes that need a decision go to the standard error.
    #[command(verbatim_doc_comment)]
    RestoreObjects(RestoreArgs),
}

/// The options that both roles have.
#[derive(Debug, Clone, clap::Args)]
pub struct CommonArgs {
    /// Name of the CSI driver, which storage classes name as their provisioner
    #[arg(long, env = "DRIVER_NAME")]
    pub driver_name: String,
    /// Name of the Node object of this machine, or its host name, which is converted to lower case, as the kubelet does
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub node_name: String,
    /// kubeconfig file for the API server; without it, the pod's service account is used
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// What to do about volumes whose node was deleted, or has lost its disk; the class parameter onNodeLoss is the policy of each
    /// volume
    #[arg(long, env = "NODE_LOSS", value_enum, default_value_t)]
    pub node_loss: NodeLoss,
    /// MutatingAdmissionPolicyBinding with which the API server labels each claim with its node, and ConfigMap of the same name in the
    /// namespace of this pod, in which the controller records that all claims have the label. Nodes then watch only their own
    /// claims. Without it, they watch all claims
    #[arg(long, env = "CLAIM_LABELS", value_name = "NAME")]
    pub claim_labels: Option<String>,
    #[command(flatten)]
    pub health: HealthArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

/// The options of the role `node`.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeArgs {
    #[command(flatten)]
    pub common: CommonArgs,
    /// Control socket of the driver loopfs-csi on this node, as unix:///path: the one that its --control-endpoint names. The driver
    /// creates, expands and deletes the volumes; this process needs write permission for the socket and no access to the disk
    #[arg(long, env = "DRIVER_SOCKET", value_name = "unix:///PATH", value_parser = socket_path)]
    pub driver_socket: PathBuf,
    #[command(flatten)]
    pub pod: PodArgs,
    #[command(flatten)]
    pub audit: AuditArgs,
}

/// The options of the role `controller`.
#[derive(Debug, Clone, clap::Args)]
pub struct ControllerArgs {
    #[command(flatten)]
    pub common: CommonArgs,
    /// Namespace of this pod, and of the Lease that the active replica holds
    #[arg(long, env = "POD_NAMESPACE")]
    pub pod_namespace: String,
    /// Name of this pod, which the Lease names while the pod is active
    #[arg(long, env = "POD_NAME")]
    pub pod_name: String,
    /// ConfigMap in --pod-namespace that declares the driver's objects (CSIDriver, storage and priority classes, roles); the
    /// controller keeps them in the declared state. Without it, they stay unchanged
    #[arg(long, env = "BUILTIN_OBJECTS", value_name = "CONFIGMAP")]
    pub builtin_objects: Option<String>,
    /// Largest share of the nodes with volumes, in percent, that may be deleted at once. If it is exceeded, by two nodes or more, no object
    /// of their volumes is deleted, because it is more likely that Node objects were deleted by mistake
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub node_loss_at_most: u8,
}

/// The options of `restore-objects`.
#[derive(Debug, Clone, clap::Args)]
pub struct RestoreArgs {
    /// Name of the CSI driver
    #[arg(long, env = "DRIVER_NAME")]
    pub driver_name: String,
    /// Name of the Node object of the machine that has the disk now, or its host name
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub node_name: String,
}

/// The pod of this process, from its pod template (fieldRef).
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PodArgs {
    /// Namespace in which to publish the free capacity of the node (CSIStorageCapacity). Without it, the capacity is not
    /// published
    #[arg(long, env = "POD_NAMESPACE")]
    pub pod_namespace: Option<String>,
    /// Name of the pod that owns these objects, so that they are deleted with it
    #[arg(long, env = "POD_NAME", requires = "pod_uid")]
    pub pod_name: Option<String>,
    /// UID of the pod
    #[arg(long, env = "POD_UID", requires = "pod_name")]
    pub pod_uid: Option<String>,
}

/// The audit: orphaned volumes, which no PersistentVolume names, and PersistentVolumes without a volume.
#[derive(Debug, Clone, clap::Args)]
pub struct AuditArgs {
    /// List the findings of the audit, one per line, and exit. Nothing is changed
    #[arg(long, conflicts_with = "collect")]
    pub audit: bool,
    /// Interval of the audit, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub audit_interval: u64,
    /// Remove orphaned volumes, including retained ones whose PersistentVolume was deleted. Only volumes that were created for claims
    /// are removed, only if their claim does not exist, and never a volume that a PersistentVolume names
    #[arg(long)]
    pub collect: bool,
    /// How long a volume must have been orphaned before it is removed, in seconds, as this process has seen it
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, requires = "collect")]
    pub collect_after: u64,
    /// Largest share of the node's volumes, in percent, that may be orphaned; above it, --collect removes none, because it is more
    /// likely that the API server has lost objects. 100 removes all orphaned volumes
    #[arg(long, value_name = "PERCENT", default_value_t = 20, requires = "collect", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub collect_at_most: u8,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use rstest::rstest;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_driver_has_no_default_name() {
        let arguments = ["p", "node", "--node-name", "n", "--driver-socket", "unix:///control.sock"];
        let error = Args::try_parse_from(arguments).unwrap_err().to_string();
        assert!(error.contains("--driver-name"), "{error}");
    }

    /// The chart and the units of systemd pass on the options of administrators without a check.
    #[rstest]
    #[case::of_the_other_role("node", "--node-loss-at-most=50")]
    #[case::above_the_range("node", "--collect-at-most=101")]
    #[case::of_the_controller("controller", "--node-loss-at-most=101")]
    fn errors_name_the_invalid_option(#[case] role: &str, #[case] option: &str) {
        let error = Args::try_parse_from(["p", role, option]).unwrap_err().to_string();
        assert!(error.contains(option.split('=').next().unwrap()), "{error}");
    }
}
