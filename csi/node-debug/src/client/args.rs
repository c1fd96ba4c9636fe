//! The command line of `dbg`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::SignedDuration;

use crate::args::DEFAULT_SOCKET;
use crate::proto::Level;

const EXIT_CODES: &str = "\
Exit codes:
  0  success; for conditions: the condition is met
  1  the condition is not met, or was not met before the timeout
  2  the command line is wrong
  3  node-debug cannot be reached or refused the request, or a file cannot be written
  dbg kubectl has the exit code of kubectl if kubectl was started

Examples:
  dbg logs                                   list the components whose logs node-debug keeps
  dbg logs kubelet --follow --since 5m --level warn
  dbg condition wait plugin-registered --timeout 60s
  dbg kubectl get pods --all-namespaces
  dbg bundle                                 write one archive for a bug report";

/// Shows the logs and the state of a node that runs node-debug.
///
/// By default, dbg connects to the socket of node-debug on this machine, for which it must run as root or as the user of
/// node-debug. To connect over TCP, give --address https://HOST:PORT and the three options of TLS.
#[derive(Clone, Debug, Parser)]
#[command(name = "dbg", version, after_help = EXIT_CODES)]
pub struct DbgArgs {
    #[command(flatten)]
    pub(super) connection: ConnectionArgs,

    #[command(subcommand)]
    pub(super) command: DbgCommand,
}

/// How to reach the service.
#[derive(Clone, Debug, Args)]
pub(super) struct ConnectionArgs {
    /// Address of node-debug: unix:///PATH, or https://HOST:PORT
    #[arg(long, env = "NODE_DEBUG_ADDRESS", value_name = "ADDRESS", default_value_t = format!("unix://{DEFAULT_SOCKET}"))]
    pub(super) address: String,

    /// Certificate of this client, as PEM
    #[arg(long, env = "NODE_DEBUG_TLS_CERT", value_name = "FILE")]
    pub(super) tls_cert: Option<PathBuf>,

    /// Private key of that certificate, as PEM
    #[arg(long, env = "NODE_DEBUG_TLS_KEY", value_name = "FILE")]
    pub(super) tls_key: Option<PathBuf>,

    /// Certificate authority of node-debug's certificate, as PEM
    #[arg(long, env = "NODE_DEBUG_SERVER_CA", value_name = "FILE")]
    pub(super) server_ca: Option<PathBuf>,
}

/// A command of `dbg`.
#[derive(Clone, Debug, Subcommand)]
pub enum DbgCommand {
    /// Prints the log of a component. Without a component, lists the components
    Logs(LogsArgs),
    /// Evaluates conditions of the node, or waits for them
    Condition(ConditionArgs),
    /// Runs kubectl with a kubeconfig that expires soon
    ///
    /// node-debug requests a token for a service account that its administrator named (--kubeconfig-service-account). The
    /// kubeconfig is in memory only, and kubectl inherits it.
    Kubectl(KubectlArgs),
    /// Writes one tar archive with all that a bug report needs, without secrets
    ///
    /// The archive has all logs, all conditions, the mount table, loop devices, quotas and versions. Tokens, private keys,
    /// Authorization headers, passwords and the secrets of CSI calls are replaced. Look through it before you publish it:
    /// a secret in a form that dbg does not know stays.
    Bundle(BundleArgs),
}

/// Arguments of `dbg logs`.
#[derive(Clone, Debug, Args)]
pub struct LogsArgs {
    /// Name of the component, as node-debug has it from --log
    pub(super) component: Option<String>,

    /// Print new lines as they arrive, until interrupted
    #[arg(long, short, requires = "component")]
    pub(super) follow: bool,

    /// Print only lines of this age or younger, such as 90s, 5m or 1h30m
    #[arg(long, value_name = "AGE", value_parser = positive_duration, requires = "component")]
    pub(super) since: Option<SignedDuration>,

    /// Print only lines of this level or a more severe one. A line without a level, as of a stack trace, has the level of the
    /// line before
    #[arg(long, value_enum, requires = "component")]
    pub(super) level: Option<LevelArg>,

    /// Print only this many of the newest lines that match
    #[arg(long, short = 'n', value_name = "COUNT", requires = "component")]
    pub(super) lines: Option<u64>,

    /// Print the time and the level before each line
    #[arg(long, requires = "component")]
    pub(super) timestamps: bool,
}

/// A level of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LevelArg {
    /// All lines.
    Trace,
    /// Details for developers.
    Debug,
    /// Normal operation.
    Info,
    /// Something unexpected.
    Warn,
    /// A failure.
    Error,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Trace => Self::Trace,
            LevelArg::Debug => Self::Debug,
            LevelArg::Info => Self::Info,
            LevelArg::Warn => Self::Warn,
            LevelArg::Error => Self::Error,
        }
    }
}

/// Arguments of `dbg condition`.
#[derive(Clone, Debug, Args)]
pub struct ConditionArgs {
    #[command(subcommand)]
    pub(super) command: ConditionCommand,
}

/// A command of `dbg condition`.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum ConditionCommand {
    /// Lists the conditions that node-debug knows
    List,
    /// Evaluates a condition once. The exit code is 0 if it is met, else 1
    Get {
        /// Name of the condition
        name: String,
        /// Its argument, such as the volume of volume-published
        arguments: Vec<String>,
    },
    /// Waits until a condition is met. The exit code is 1 if the timeout passes before
    Wait {
        /// Name of the condition
        name: String,
        /// Its argument, such as the volume of volume-published
        arguments: Vec<String>,
        /// The longest wait, such as 60s or 5m; at most 1h
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = positive_duration)]
        timeout: SignedDuration,
    },
}

/// Arguments of `dbg kubectl`.
#[derive(Clone, Debug, Args)]
pub struct KubectlArgs {
    /// Service account to act as, by the name that node-debug has from --kubeconfig-service-account. Without it, the first
    #[arg(long = "as-account", value_name = "NAME")]
    pub(super) account: Option<String>,

    /// Lifetime of the kubeconfig, such as 10m or 1h; at least 10m
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = positive_duration)]
    pub(super) lifetime: SignedDuration,

    /// Program to run in place of kubectl
    #[arg(long, value_name = "PROGRAM", default_value = "kubectl")]
    pub(super) kubectl: OsString,

    /// Arguments of kubectl
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub(super) arguments: Vec<OsString>,
}

/// Arguments of `dbg bundle`.
#[derive(Clone, Debug, Args)]
pub struct BundleArgs {
    /// File to write; it must not exist. Without it, node-debug-TIME.tar in the working directory
    #[arg(long, short, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
}

fn positive_duration(text: &str) -> Result<SignedDuration, String> {
    match text.parse::<SignedDuration>() {
        Ok(duration) if duration.is_negative() => Err("must not be negative".to_owned()),
        Ok(duration) => Ok(duration),
        Err(_not_a_duration) => Err("must be a number with a unit, such as 90s, 5m or 1h30m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use rstest::rstest;

    use super::*;

    #[test]
    fn the_command_line_definition_is_valid() {
        DbgArgs::command().debug_assert();
    }

    #[rstest]
    #[case::minutes("5m", Some(300))]
    #[case::several_units("1h30m", Some(5400))]
    #[case::no_unit("5", None)]
    #[case::negative("-5m", None)]
    #[case::words("soon", None)]
    fn a_duration_has_a_unit(#[case] text: &str, #[case] seconds: Option<i64>) {
        assert_eq!(positive_duration(text).ok(), seconds.map(SignedDuration::from_secs));
    }

    /// Even options that dbg knows are passed on.
    #[test]
    fn options_after_a_subcommand_reach_kubectl() {
        let args = DbgArgs::parse_from([
            "dbg",
            "kubectl",
            "--as-account",
            "a",
            "get",
            "pods",
            "-n",
            "x",
            "--address",
        ]);
        let DbgCommand::Kubectl(kubectl) = args.command else { panic!("another command") };
        assert_eq!(kubectl.arguments, ["get", "pods", "-n", "x", "--address"]);
        assert_eq!(kubectl.account.as_deref(), Some("a"));
    }
}
