//! The service node-debug on the harness's nodes, and its client dbg.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use kube::Client;
use serde_json::json;
use testvm::session::Session;
use testvm_cluster::{Node, TOOLS_DIR};
use testvm_guest::control::ExecOutput;

use super::manifests;
use crate::nodes::DBG;

/// Limits a command that does not wait for a condition. The node is emulated, and may have the fault that the command is about.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The time that a command may take besides its wait.
const MARGIN: Duration = Duration::from_secs(30);

/// Writes an archive, prints it in base64 and removes it. The archive is on a file system in memory, because the disk may be
/// the fault that it is about.
const BUNDLE: &str = "set -e
directory=$(mktemp -d /run/bundle.XXXXXX)
trap 'rm -rf \"$directory\"' EXIT
\"$1\" bundle --output \"$directory/bundle.tar\" >&2
base64 --wrap=0 \"$directory/bundle.tar\"";

/// Grants node-debug what an administrator grants it, and the account of `dbg kubectl` its rights.
pub(crate) async fn grant(session: &Session, client: &Client) -> Result<()> {
    let manifests = manifests::of_node_debug(session.workspace.root(), &["rbac.yaml", "viewer.yaml"])?;
    manifests.apply(client).await.context("grant node-debug its rights")
}

/// Lets the account of `dbg kubectl` read the logs of the driver. The driver's namespace must exist.
pub(crate) async fn grant_driver_logs(session: &Session, client: &Client) -> Result<()> {
    let manifests = manifests::of_node_debug(session.workspace.root(), &["driver-logs.yaml"])?;
    manifests.apply(client).await.context("grant node-debug the driver's logs")
}

/// Runs `dbg` on a node, and returns its output, whatever its exit code.
pub(crate) async fn run(node: &Node, args: &[&str]) -> Result<ExecOutput> {
    run_within(node, args, TIMEOUT).await
}

/// Waits until a condition of the node is met. `condition` has the name of the condition and its arguments.
pub(crate) async fn wait(node: &Node, condition: &[&str], within: Duration) -> Result<()> {
    let timeout = format!("{}s", within.as_secs());
    let args = [&["condition", "wait", "--timeout", timeout.as_str()], condition].concat();
    let output = run_within(node, &args, within + MARGIN).await?;
    anyhow::ensure!(
        output.code == 0,
        "condition {} of {}: {}{}",
        condition.join(" "),
        node.name(),
        output.stdout.trim(),
        output.stderr.trim()
    );
    Ok(())
}

/// Returns `true` if a condition of the node is met.
pub(crate) async fn is_met(node: &Node, condition: &[&str]) -> Result<bool> {
    let args = [&["condition", "get"], condition].concat();
    let output = run(node, &args).await?;
    match output.code {
        0 => Ok(true),
        1 => Ok(false),
        _ => anyhow::bail!("dbg {} ended with {output:?}", args.join(" ")),
    }
}

/// Stores the archive of `dbg bundle` of a node at `path`.
pub(crate) async fn store_bundle(node: &Node, path: &Path) -> Result<()> {
    let dbg = program();
    let encoded = node.output_within(&["sh", "-c", BUNDLE, "sh", &dbg], TIMEOUT).await?;
    let ByteString(archive) =
        serde_json::from_value(json!(encoded.trim())).context("decode the archive of dbg bundle")?;
    fs::write(path, archive).with_context(|| format!("write {}", path.display()))
}

async fn run_within(node: &Node, args: &[&str], timeout: Duration) -> Result<ExecOutput> {
    let dbg = program();
    let argv: Vec<&str> = [dbg.as_str()].into_iter().chain(args.iter().copied()).collect();
    node.exec_within(&argv, timeout).await
}

fn program() -> String {
    format!("{TOOLS_DIR}/{DBG}")
}
