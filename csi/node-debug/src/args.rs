//! The command line of the service.

use std::path::PathBuf;

use clap::Parser;
use csi::DriverName;
use service::{LogArgs, absolute_path, socket_path};

use crate::cluster::AllowedAccount;
use crate::logs::LogSource;

/// The socket on which the service listens, and to which `dbg` connects.
pub const DEFAULT_SOCKET: &str = "/run/node-debug/node-debug.sock";

/// Serves facts about this node to the client dbg: logs, conditions, and a kubeconfig that expires soon.
///
/// The service never runs by default: an administrator starts it to look for a fault. Only root and the user of the service
/// can connect to its socket.
#[derive(Clone, Debug, Parser)]
#[command(
    version,
    after_help = "Example:\n  node-debug --log kubelet=/var/log/kubelet.log --log kernel=kmsg --driver-name csi.loopfs.dev \
                  --data-dir /var/lib/loopfs/data\n\nThen, on the same node: dbg logs kubelet --follow"
)]
pub struct Args {
    /// Unix socket to listen on. Its directory is created with mode 0700, and must not be writable by other users
    #[arg(long, env = "NODE_DEBUG_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET, value_parser = socket_path)]
    pub socket: PathBuf,

    /// Component and its log: NAME=/PATH of a file, or NAME=kmsg for the kernel's log. Repeat it for each component
    #[arg(long = "log", value_name = "NAME=SOURCE")]
    pub logs: Vec<LogSource>,

    /// Name of the CSI driver, for the conditions plugin-serving and plugin-registered
    #[arg(long, env = "DRIVER_NAME", value_name = "NAME")]
    pub driver_name: Option<DriverName>,

    /// The kubelet's directory of registration sockets, for the same conditions
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/kubelet/plugins_registry", value_parser = absolute_path)]
    pub registration_dir: PathBuf,

    /// Mount point of the volumes, for the conditions quota-enforced and volume-published and for the quotas of dbg bundle
    #[arg(long, env = "DATA_DIR", value_name = "DIRECTORY", value_parser = absolute_path)]
    pub data_dir: Option<PathBuf>,

    /// Name of this node's Node object, for the conditions node-ready and plugin-registered
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,

    /// kubeconfig of the service, to read the Node and CSINode of this node and to request tokens. It is never given to clients
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Service account for which clients may request a kubeconfig: its namespace and name. The service needs the verb create on
    /// serviceaccounts/token
    #[arg(long = "kubeconfig-service-account", value_name = "NAMESPACE/ACCOUNT", requires = "kubeconfig")]
    pub service_account: Option<AllowedAccount>,

    /// Contents and format of the service's own log
    #[command(flatten)]
    pub log: LogArgs,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_definition_is_valid() {
        Args::command().debug_assert();
    }

    #[test]
    fn account_needs_a_kubeconfig() {
        let parse = |options: &[&str]| Args::try_parse_from(["node-debug"].iter().chain(options));
        let account = "--kubeconfig-service-account=b/c";
        assert!(parse(&[account]).is_err());
        assert!(parse(&[account, "--kubeconfig=k"]).is_ok());
    }
}
