//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use monitoring::HttpAddress;
use tracing_subscriber::EnvFilter;

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

    /// Address for /metrics, /healthz and /readyz over HTTP: ADDRESS:PORT, or :PORT for all addresses. Without this
    /// option, the driver does not serve them
    #[arg(long)]
    pub metrics_address: Option<HttpAddress>,

    /// Address for /healthz and /readyz alone, in the same form, for the kubelet's probes. Without this option, the
    /// driver does not serve them there
    #[arg(long)]
    pub probe_address: Option<HttpAddress>,

    /// Interval in seconds at which the driver checks the condition of all volumes, if metrics are served, and searches for files that
    /// are charged to another volume
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub audit_interval: u64,

    /// Walk the directories of all volumes, for up to a twentieth of the time, to find files that carry the project id of another volume and
    /// so use up its limit. They are searched for anyway if the project id of a deleted volume does not become free, or a volume
    /// becomes full
    #[arg(long)]
    pub audit_projects: bool,

    /// Put such files back into the project of the volume that holds them, also beyond its limit
    #[arg(long)]
    pub repair_projects: bool,

    /// Contents and format of the log
    #[command(flatten)]
    pub log: LogArgs,
}

/// Contents and format of the log.
#[derive(Clone, Debug, Parser)]
pub struct LogArgs {
    /// Least severe level to log, or directives of the form target=level,target=level
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub log_level: EnvFilterText,

    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogLineFormat::Text)]
    pub log_format: LogLineFormat,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLineFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Validated log directives. [`EnvFilter`] itself cannot be cloned.
#[derive(Clone, Debug)]
pub struct EnvFilterText(String);

impl std::str::FromStr for EnvFilterText {
    type Err = tracing_subscriber::filter::ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        EnvFilter::try_new(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl LogArgs {
    /// Initialises logging of this process to standard error.
    pub fn init(&self) {
        let Self { log_level: EnvFilterText(directives), log_format } = self;
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(directives))
            .with_writer(std::io::stderr);
        match log_format {
            LogLineFormat::Text => log.with_ansi(false).init(),
            LogLineFormat::Json => log.json().init(),
        }
    }
}

/// Parses the name of a node. A Node object has no upper case letters, and the kubelet names its own after the host name, which
/// may have them.
fn node_name(text: &str) -> Result<String, String> {
    let name = text.trim().to_lowercase();
    if name.is_empty() { Err("must not be empty".to_owned()) } else { Ok(name) }
}

/// Parses an absolute path, as the value of an option.
///
/// # Errors
/// The path is relative.
pub fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("must be an absolute path".to_owned()) }
}

/// The capacity of `sockaddr_un`, less the dot and the suffix of the hidden name under which a socket is created (see
/// `socket.rs`).
const MAX_SOCKET_PATH_LEN: usize = 107 - ".".len() - ".new".len();

fn socket_path(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")).unwrap_or(text);
    if path.len() > MAX_SOCKET_PATH_LEN {
        return Err(format!("must not be longer than {MAX_SOCKET_PATH_LEN} bytes"));
    }
    match PathBuf::from(path) {
        path if !path.is_absolute() => Err("must be unix:// and an absolute path".to_owned()),
        path if path.file_name().is_none() => Err("must name a file".to_owned()),
        path => Ok(path),
    }
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
    #[case::three_slashes("unix:///csi/csi.sock", Some("/csi/csi.sock"))]
    #[case::one_slash("unix:/csi/csi.sock", Some("/csi/csi.sock"))]
    #[case::plain("/csi/csi.sock", Some("/csi/csi.sock"))]
    #[case::relative("unix://csi.sock", None)]
    #[case::network("tcp://127.0.0.1:1", None)]
    #[case::no_file("unix:///", None)]
    #[case::empty("", None)]
    fn endpoint_is_an_absolute_unix_path(#[case] text: &str, #[case] path: Option<&str>) {
        assert_eq!(socket_path(text).ok(), path.map(PathBuf::from));
    }

    #[rstest]
    #[case::host_name("Node-1.Example\n", Some("node-1.example"))]
    #[case::empty(" ", None)]
    fn a_node_is_named_as_by_its_kubelet(#[case] given: &str, #[case] expected: Option<&str>) {
        assert_eq!(node_name(given).ok().as_deref(), expected);
    }

    #[test]
    fn registration_requires_the_kubelet_csi_socket() {
        let base =
            ["loopfs-csi", "--driver-name=a.b", "--node-name=n", "--data-dir=/d", "--endpoint=unix:///s"];
        assert!(Args::try_parse_from(base).is_ok());
        assert!(Args::try_parse_from(base.into_iter().chain(["--registration-dir=/r"])).is_err());
        let both = ["--registration-dir=/r", "--kubelet-csi-socket=/k/s"];
        assert!(Args::try_parse_from(base.into_iter().chain(both)).is_ok());
    }
}
