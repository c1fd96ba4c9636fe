//! Programs that a benchmark runs on a node beside the pods.

use anyhow::{Context, Result};
use testvm_cluster::{Node, TOOLS_DIR};

/// A running program of the node's tools.
pub(super) struct NodeProcess<'a> {
    node: &'a Node,
    log: String,
    pid: String,
}

impl<'a> NodeProcess<'a> {
    /// Starts a program of the node's tools in the background. Its working directory is `directory` on the node, which also
    /// gets its log.
    pub(super) async fn start(
        node: &'a Node,
        directory: &str,
        name: &str,
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
        let pid = node.output(&argv).await.with_context(|| format!("start {name} on the node"))?;
        Ok(NodeProcess { node, log: format!("{directory}/{name}.log"), pid: pid.trim().to_owned() })
    }

    /// Sends a signal that ends the process, such as `KILL`, and waits for its end.
    pub(super) async fn stop(self, signal: &str) -> Result<()> {
        let script = "kill -\"$2\" \"$1\" && tail --pid=\"$1\" -f /dev/null";
        let ended = self.node.output(&["sh", "-c", script, "sh", &self.pid, signal]).await;
        ended.with_context(|| format!("stop the program with the log {} on the node", self.log)).map(drop)
    }
}
