//! The command line.

use std::path::PathBuf;

use clap::Parser;
use service::{HealthArgs, LogArgs, absolute_path, node_name, socket_path};

use crate::driver::DriverName;

/// CSI driver for node-local volumes: directories with a quota, and images that are attached as block devices.
#[derive(Clone, Debug, Parser)]
#[command(name = "loopfs-csi", version)]
pub struct Args {
    /// Name of the driver, as in the CSIDriver object. There is no default, because only the manifests define the name
    #[arg(long, env = "DRIVER_NAME")]
    pub driver_name: DriverName,

    /// Name of this node, as in its Node object, or its host name: the driver converts it to lower case, as the kubelet does
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub node_name: String,

    /// Mount point of the XFS file system that holds the volumes
    #[arg(long, value_parser = absolute_path)]
    pub data_dir: PathBuf,

    /// Socket to serve CSI on, as unix:///path
    #[arg(long, env = "CSI_ENDPOINT", value_parser = socket_path)]
    pub endpoint: PathBuf,

    /// Socket for the provisioner and for csi-snapshotter, as unix:///path. It serves no calls that publish volumes. The group of its
    /// directory can connect to it. Without this option, there is none
    #[arg(long, value_parser = socket_path)]
    pub control_endpoint: Option<PathBuf>,

    /// The kubelet's directory. The driver publishes volumes below it and nowhere else
    #[arg(long, default_value = "/var/lib/kubelet", value_parser = absolute_path)]
    pub kubelet_dir: PathBuf,

    /// The kubelet's plugins_registry directory. Without this option, the driver does not register
    #[arg(long, requires = "kubelet_csi_socket", value_parser = absolute_path)]
    pub registration_dir: Option<PathBuf>,

    /// Path of the endpoint's socket in the kubelet's mount namespace
    #[arg(long, requires = "registration_dir", value_parser = socket_path)]
    pub kubelet_csi_socket: Option<PathBuf>,

    /// Addresses of the endpoints for health and metrics
    #[command(flatten)]
    pub health: HealthArgs,

    /// Interval in seconds at which the driver checks the condition of all volumes, if metrics are served, and searches for files that
    /// are charged to another volume
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub check_interval: u64,

    /// Walk the directories of all volumes, for up to a twentieth of the time, to find files that carry the project id of another volume and
    /// so use up its limit. They are searched for anyway if the project id of a deleted volume does not become free, or a volume
    /// becomes full
    #[arg(long)]
    pub search_projects: bool,

    /// Put such files back into the project of the volume that holds them, also beyond its limit
    #[arg(long)]
    pub repair_projects: bool,

    /// Contents and format of the log
    #[command(flatten)]
    pub log: LogArgs,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const BASE: [&str; 5] =
        ["loopfs-csi", "--driver-name=a.b", "--node-name=n", "--data-dir=/d", "--endpoint=unix:///s"];

    #[test]
    fn registration_requires_the_kubelet_csi_socket() {
        assert!(Args::try_parse_from(BASE).is_ok());
        assert!(Args::try_parse_from(BASE.into_iter().chain(["--registration-dir=/r"])).is_err());
        let both = ["--registration-dir=/r", "--kubelet-csi-socket=/k/s"];
        assert!(Args::try_parse_from(BASE.into_iter().chain(both)).is_ok());
    }

    /// The chart and the units of systemd pass on the options of administrators without a check.
    #[rstest]
    #[case::unknown("--checks=300")]
    #[case::below_the_range("--check-interval=0")]
    #[case::in_the_manifests_already("--data-dir=/e")]
    fn errors_name_the_invalid_option(#[case] option: &str) {
        let error = Args::try_parse_from(BASE.into_iter().chain([option])).unwrap_err().to_string();
        assert!(error.contains(option.split('=').next().unwrap()), "{error}");
    }
}
