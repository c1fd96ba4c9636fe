//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use monitoring::HttpAddress;

use crate::loss::NodeLoss;

/// Makes, grows and deletes volumes for the claims of one Kubernetes node.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub struct Args {
    /// Name of the CSI driver, which storage classes give as their provisioner
    #[arg(long, env = "DRIVER_NAME")]
    pub driver_name: String,
    /// Name of the Node object of the machine this runs on
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Where the file system for volumes is mounted (XFS, option prjquota)
    #[arg(long, env = "DATA_DIR")]
    pub data_dir: PathBuf,
    /// How to reach the API server; the pod's service account if not given
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    pub pod: PodArgs,
    /// What to do about volumes of nodes that are gone, as their classes say (parameter onNodeLoss)
    #[arg(long, env = "NODE_LOSS", value_enum, default_value_t)]
    pub node_loss: NodeLoss,
    /// Where to serve /metrics, /healthz and /readyz over HTTP: ADDRESS:PORT, or :PORT for all addresses. Not served without
    #[arg(long)]
    pub metrics_address: Option<HttpAddress>,
    /// Where to serve /healthz and /readyz alone, for the probes of the kubelet, in the same form. Not served without
    #[arg(long)]
    pub probe_address: Option<HttpAddress>,
    /// Keep the driver's objects (CSIDriver, storage and priority classes, roles) as this ConfigMap of --pod-namespace declares
    /// them; they are left alone if not given
    #[arg(long, env = "BUILTIN_OBJECTS", value_name = "CONFIGMAP", requires = "pod_namespace")]
    pub builtin_objects: Option<String>,
    #[command(flatten)]
    pub audit: AuditArgs,
    /// What to log: error, warn, info, debug, trace, or a tracing filter
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub log_level: String,
    /// How to log
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// The pod this runs in, which its pod template tells it (fieldRef).
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PodArgs {
    /// Namespace in which to tell the scheduler how much room the node has (CSIStorageCapacity); it is not told if not
    /// given
    #[arg(long, env = "POD_NAMESPACE")]
    pub pod_namespace: Option<String>,
    /// Name of the pod, with which those objects go
    #[arg(long, env = "POD_NAME", requires = "pod_uid")]
    pub pod_name: Option<String>,
    /// UID of the pod
    #[arg(long, env = "POD_UID", requires = "pod_name")]
    pub pod_uid: Option<String>,
}

/// Volumes that no PersistentVolume names, and PersistentVolumes without a volume.
#[derive(Debug, Clone, clap::Args)]
pub struct AuditArgs {
    /// List them, one a line, and end. Nothing is changed
    #[arg(long, conflicts_with = "collect")]
    pub audit: bool,
    /// How often to look for them, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub audit_interval: u64,
    /// Remove volumes that no PersistentVolume names, what was retained and then lost its object among them. Of those made for
    /// claims only, and not while their claim is there; and never what a PersistentVolume names
    #[arg(long)]
    pub collect: bool,
    /// For how long nobody has to have named a volume before it is removed, in seconds, as far as this process has seen
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, requires = "collect")]
    pub collect_after: u64,
    /// The share of the node's volumes, in percent, above which --collect removes none: so many orphans at once mean rather that
    /// the API server has lost objects. 100 removes whatever is an orphan
    #[arg(long, value_name = "PERCENT", default_value_t = 20, requires = "collect", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub collect_at_most: u8,
    /// Walk the directories of all volumes each time, to find files that carry the project id of another volume and so use
    /// up its limit. They are searched for anyway if the project id of a deleted volume does not become free, or a volume
    /// becomes full
    #[arg(long)]
    pub audit_projects: bool,
    /// Put such files back into the project of the volume that holds them, also beyond its limit
    #[arg(long)]
    pub repair_projects: bool,
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_driver_has_no_default_name() {
        let error =
            Args::try_parse_from(["p", "--node-name", "n", "--data-dir", "/d"]).unwrap_err().to_string();
        assert!(error.contains("--driver-name"), "{error}");
    }
}
