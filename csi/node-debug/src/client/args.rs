//! The command line of `dbg`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use jiff::SignedDuration;
use service::socket_path;

use crate::args::DEFAULT_SOCKET;

const EXIT_CODES: &str = "\
Exit codes:
  0  success; for conditions: the condition is met
  1  the condition is not met, or was not met before the timeout
  2  the command line is wrong
  3  node-debug cannot be reached or refused the request, or a file cannot be written
  dbg kubectl has the exit code of kubectl if kubectl was started

Examples:
  dbg logs                                   list the components whose logs node-debug reads
  dbg logs kubelet --follow --lines 20
  dbg condition wait plugin-registered --timeout 60s
  dbg kubectl get pods --all-namespaces
  dbg bundle                                 write one archive for a bug report";

/// Shows the logs and the state of a node that runs node-debug.
///
/// dbg connects to the socket of node-debug on this machine. It must run as root or as the user of node-debug.
#[derive(Clone, Debug, Parser)]
#[command(name = "dbg", version, after_help = EXIT_CODES)]
pub struct DbgArgs {
    /// Socket of node-debug
    #[arg(long, env = "NODE_DEBUG_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET, value_parser = socket_path)]
    pub(super) socket: PathBuf,

    #[command(subcommand)]
    pub(super) command: DbgCommand,
}

/// A command of `dbg`.
#[derive(Clone, Debug, Subcommand)]
pub enum DbgCommand {
    /// Prints the log of a component. Without a component, lists the components
    Logs(LogsArgs),
    /// Evaluates conditions of the node, or waits for them
    #[command(subcommand)]
    Condition(ConditionCommand),
    /// Runs kubectl with a kubeconfig that expires soon
    ///
    /// node-debug requests a token for the service account that its administrator named (--kubeconfig-service-account). The
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

    /// Print only this many of the newest lines. Without it, the newest 4 MiB
    #[arg(long, short = 'n', value_name = "COUNT", requires = "component")]
    pub(super) lines: Option<u64>,
}

/// A command of `dbg condition`.
#[derive(Clone, Debug, Subcommand)]
pub enum ConditionCommand {
    /// Lists the conditions that node-debug knows
    List,
    /// Evaluates a condition once. The exit code is 0 if it is met, else 1
    Get {
        /// Name of the condition
        name: String,
        /// Its argument, such as the volume of volume-published
        argument: Option<String>,
    },
    /// Waits until a condition is met. The exit code is 1 if the timeout passes before
    Wait {
        /// Name of the condition
        name: String,
        /// Its argument, such as the volume of volume-published
        argument: Option<String>,
        /// The longest wait, such as 60s or 5m
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
        timeout: Duration,
    },
}

/// Arguments of `dbg kubectl`.
#[derive(Clone, Debug, Args)]
pub struct KubectlArgs {
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

fn duration(text: &str) -> Result<Duration, String> {
    let duration = text.parse::<SignedDuration>().ok().and_then(|duration| duration.try_into().ok());
    duration.ok_or_else(|| "must be a number with a unit, such as 90s, 5m or 1h30m".to_owned())
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
    fn a_duration_has_a_unit(#[case] text: &str, #[case] seconds: Option<u64>) {
        assert_eq!(duration(text).ok(), seconds.map(Duration::from_secs));
    }

    /// Even options that dbg knows are passed on.
    #[test]
    fn options_after_a_subcommand_reach_kubectl() {
        let args = DbgArgs::parse_from(["dbg", "kubectl", "get", "pods", "-n", "x", "--socket"]);
        let DbgCommand::Kubectl(kubectl) = args.command else { panic!("another command") };
        assert_eq!(kubectl.arguments, ["get", "pods", "-n", "x", "--socket"]);
    }
}
