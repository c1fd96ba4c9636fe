//! The options that the programs share.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

use crate::address::HttpAddress;

/// Contents and format of the log.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Least severe level to log (error, warn, info, debug or trace), or directives of the form target=level,target=level
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    log_level: EnvFilterText,

    /// Format of log lines
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Validated log directives. [`EnvFilter`] itself cannot be cloned.
#[derive(Clone, Debug)]
struct EnvFilterText(String);

impl FromStr for EnvFilterText {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        EnvFilter::try_new(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl LogArgs {
    /// Logs to the standard error from now on.
    pub fn init(&self) {
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(&self.log_level.0))
            .with_writer(std::io::stderr);
        match self.log_format {
            LogFormat::Text => log.with_ansi(false).init(),
            LogFormat::Json => log.json().init(),
        }
    }
}

/// The addresses of the endpoints for health and metrics.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct HealthArgs {
    /// Address for /metrics, /healthz and /readyz over HTTP: ADDRESS:PORT, or :PORT for all addresses. Without this option, they are
    /// not served
    #[arg(long)]
    pub metrics_address: Option<HttpAddress>,

    /// Address for /healthz and /readyz alone, in the same form, for the kubelet's probes. Without this option, they are not served
    /// there
    #[arg(long)]
    pub probe_address: Option<HttpAddress>,
}

/// Parses an absolute path, as the value of an option.
///
/// # Errors
/// The path is relative.
pub fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("must be an absolute path".to_owned()) }
}

/// The capacity of `sockaddr_un`, less the hidden name under which a server creates its socket, in place of a name of one byte.
const MAX_SOCKET_PATH_LEN: usize = 107 - ".01234567".len() + 1;

/// Parses the address of a unix socket, as the value of an option: `unix:///path`. CSI also allows the path alone.
///
/// # Errors
/// The path is relative, names no file, or is too long for a socket.
pub fn socket_path(text: &str) -> Result<PathBuf, String> {
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

/// Parses the name of a node, as the value of an option. A Node object has no upper case letters, and the kubelet names its own after
/// the host name, which may have them.
///
/// # Errors
/// The name is empty.
pub fn node_name(text: &str) -> Result<String, String> {
    let name = text.trim().to_lowercase();
    if name.is_empty() { Err("must not be empty".to_owned()) } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rstest::rstest;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        log: LogArgs,
    }

    #[rstest]
    #[case::level("debug", true)]
    #[case::directives("info,csi=trace", true)]
    #[case::no_level("csi=loud", false)]
    fn log_directives_are_checked(#[case] directives: &str, #[case] is_valid: bool) {
        let program = Program::try_parse_from(["program", "--log-level", directives, "--log-format=json"]);
        assert_eq!(program.is_ok_and(|program| program.log.log_format == LogFormat::Json), is_valid);
    }

    #[rstest]
    #[case::three_slashes("unix:///csi/csi.sock", Some("/csi/csi.sock"))]
    #[case::one_slash("unix:/csi/csi.sock", Some("/csi/csi.sock"))]
    #[case::plain("/csi/csi.sock", Some("/csi/csi.sock"))]
    #[case::relative("unix://csi.sock", None)]
    #[case::network("tcp://127.0.0.1:1", None)]
    #[case::no_file("unix:///", None)]
    #[case::empty("", None)]
    fn a_socket_has_an_absolute_path(#[case] text: &str, #[case] path: Option<&str>) {
        assert_eq!(socket_path(text).ok(), path.map(PathBuf::from));
    }

    /// The name is the host name in lower case without white space.
    #[rstest]
    #[case::host_name("Node-1.Example\n", Some("node-1.example"))]
    #[case::empty(" ", None)]
    fn node_name_matches_kubelet(#[case] text: &str, #[case] name: Option<&str>) {
        assert_eq!(node_name(text).ok().as_deref(), name);
    }
}
