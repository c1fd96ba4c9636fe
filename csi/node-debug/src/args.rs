//! The command line of the service.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use csi::DriverName;
use service::{LogArgs, absolute_path};

use crate::cluster::AllowedAccount;
use crate::logs::LogSource;

/// The socket on which the service listens, and to which `dbg` connects.
pub const DEFAULT_SOCKET: &str = "/run/node-debug/node-debug.sock";

/// Serves facts about this node to the client dbg: logs, conditions, and kubeconfigs that expire soon.
///
/// The service never runs by default: an administrator starts it to look for a fault. Only root and the user of the service
/// can connect to its socket. Over TCP, only clients with a certificate of --client-ca can.
#[derive(Clone, Debug, Parser)]
#[command(
    version,
    after_help = "Example:\n  node-debug --log kubelet=/var/log/kubelet.log --log kernel=kmsg --driver-name csi.loopfs.dev \
                  --data-dir /var/lib/loopfs/data\n\nThen, on the same node: dbg logs kubelet --follow"
)]
pub struct Args {
    /// Unix socket to listen on. Its directory is created with mode 0700, and must not be writable by other users
    #[arg(long, env = "NODE_DEBUG_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET, value_parser = absolute_path)]
    pub socket: PathBuf,

    /// Also listen on this TCP address, such as 10.0.0.5:9443. Needs the three options below
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["tls_cert", "tls_key", "client_ca"])]
    pub listen: Option<SocketAddr>,

    /// Certificate of the service, as PEM
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of that certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub tls_key: Option<PathBuf>,

    /// Certificate authority of the clients, as PEM. Every certificate that it has issued gives full access to the service, so
    /// use an authority for this purpose alone
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub client_ca: Option<PathBuf>,

    /// Component whose log to keep, and where its lines come from: NAME=/PATH of a file, NAME=fifo:/PATH, NAME=unix:/PATH, or
    /// NAME=kmsg for the kernel's log. Repeat it for each component
    #[arg(long = "log", value_name = "NAME=SOURCE")]
    pub logs: Vec<LogSource>,

    /// Bytes of log to keep in memory for each component
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(64 << 10..=1 << 30))]
    pub log_bytes: u32,

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

    /// Service account for which clients may request a kubeconfig: the name by which they request it, the namespace and the name
    /// of the account. The service needs the verb create on serviceaccounts/token. Repeat it for each account; the first is the
    /// default
    #[arg(
        long = "kubeconfig-service-account",
        value_name = "NAME=NAMESPACE/ACCOUNT",
        requires = "kubeconfig"
    )]
    pub service_accounts: Vec<AllowedAccount>,

    /// Longest lifetime of a kubeconfig that clients may request, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(600..=86_400))]
    pub kubeconfig_max_lifetime: u32,

    /// Contents and format of the service's own log
    #[command(flatten)]
    pub log: LogArgs,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use rstest::rstest;

    use super::*;

    #[test]
    fn the_command_line_definition_is_valid() {
        Args::command().debug_assert();
    }

    #[rstest]
    #[case::socket_alone(&[], true)]
    #[case::all(&["--listen=127.0.0.1:1", "--tls-cert=c", "--tls-key=k", "--client-ca=a"], true)]
    #[case::no_client_ca(&["--listen=127.0.0.1:1", "--tls-cert=c", "--tls-key=k"], false)]
    #[case::no_certificate(&["--listen=127.0.0.1:1", "--client-ca=a"], false)]
    #[case::certificate_without_listener(&["--tls-cert=c"], false)]
    #[case::account_without_kubeconfig(&["--kubeconfig-service-account=a=b/c"], false)]
    #[case::account(&["--kubeconfig-service-account=a=b/c", "--kubeconfig=k"], true)]
    #[case::ring_too_small(&["--log-bytes=1"], false)]
    fn combinations_of_options_are_checked(#[case] options: &[&str], #[case] is_valid: bool) {
        let parsed = Args::try_parse_from(["node-debug"].iter().chain(options));
        assert_eq!(parsed.is_ok(), is_valid, "{parsed:?}");
    }
}
