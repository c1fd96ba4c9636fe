//! Programs that a benchmark runs on a node beside the pods.

use std::time::Duration;

use anyhow::{Context, Result};
use testvm_cluster::{Node, TOOLS_DIR};

/// The timeout of a command on an emulated processor.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// A running program of the node's tools.
pub(super) struct NodeProcess<'a> {
    node: &'a Node,
    name: &'static str,
    directory: &'static str,
    pid: String,
}

impl<'a> NodeProcess<'a> {
    /// Starts a program of the node's tools in the background. Its working directory is `directory` on the node, which also
    /// gets its log.
    pub(super) async fn start(
        node: &'a Node,
        directory: &'static str,
        name: &'static str,
        args: &[String],
    ) -> Result<NodeProcess<'a>> {
        // The program runs in a session of its own, because the process group of a command is killed after the
        // command has ended. The command ends after the program has redirected its output to its log, at which
        // point it has left the group.
        let script = format!(
            "cd {directory} || exit; export NODE_NAME=\"$1\"; shift; \
             pid=$(setsid sh -c 'echo $$; exec \"$@\" </dev/null >>{name}.log 2>&1' sh \"$@\" &); echo \"$pid\""
        );
        let program = format!("{TOOLS_DIR}/{name}");
        let mut argv = vec!["sh", "-c", &script, "sh", node.name(), &program];
        argv.extend(args.iter().map(String::as_str));
        let pid =
            node.output(&argv, COMMAND_TIMEOUT).await.with_context(|| format!("start {name} on the node"))?;
        Ok(NodeProcess { node, name, directory, pid: pid.trim().to_owned() })
    }

    /// Kills the process, because its work need not be finished.
    pub(super) async fn kill(self) -> Result<()> {
        self.signal("KILL").await
    }

    /// Stops the process with SIGTERM, and waits until it has ended.
    pub(super) async fn terminate(self) -> Result<()> {
        self.signal("TERM").await
    }

    async fn signal(&self, signal: &str) -> Result<()> {
        let NodeProcess { node, name, directory, pid } = self;
        let script = "kill -\"$2\" \"$1\" && tail --pid=\"$1\" -f /dev/null";
        let ended = node.output(&["sh", "-c", script, "sh", pid, signal], COMMAND_TIMEOUT).await;
        ended
            .with_context(|| format!("stop {name} on the node, whose log there is {directory}/{name}.log"))
            .map(drop)
    }
}
