//! node-debug and dbg on a node with a real containerd, kubelet, API server and driver.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::ResourceExt;
use testvm_cluster::{Node, TOOLS_DIR, log_file};
use testvm_guest::control::ExecOutput;

use crate::e2e::scenario::{Scenario, StepResult};
use crate::e2e::state_dump;
use crate::nodes::DBG;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::node_debug::{is_met, output, run as dbg, wait};

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// The component whose log the scenario reads and writes.
const COMPONENT: &str = "containerd";
/// What containerd logs first.
const FIRST_MESSAGE: &str = "starting containerd";

/// A secret that no program uses.
const SECRET: &str = "hunter2-of-the-scenario-node";
/// Appends lines with the secret to a log, and waits until node-debug has the last of them. A further line ends dbg, whose
/// reader has gone by then.
const LOG_SECRET: &str = "set -e
printf '%s\\n' \"{\\\"password\\\":\\\"$3\\\"}\" \"Authorization: Bearer $3\" \"the last one: token=$3\" >> \"$2\"
\"$1\" logs containerd --follow | {
  grep --max-count=1 --fixed-strings \"the last one: token=$3\"
  exec 0<&-
  echo 'the secret was found' >> \"$2\"
}";

/// Runs while a pod uses `claim`.
pub(super) async fn run(
    scenario: &mut Scenario<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    claim: &str,
) -> StepResult {
    scenario.step("dbg logs prints the log of containerd", logs(node)).await?;
    scenario
        .step("dbg condition wait finds the driver, the quotas, the node and the volume", async {
            conditions(env, node, claim).await
        })
        .await?;
    scenario
        .step("dbg kubectl lists pods, and is refused secrets and other accounts", kubectl(env, node))
        .await?;
    scenario.step("dbg bundle arrives with the logs and without a secret in them", bundle(node)).await
}

async fn logs(node: &Node) -> Result<()> {
    let log = output(node, &["logs", COMPONENT]).await?;
    anyhow::ensure!(log.contains(FIRST_MESSAGE), "the log of {COMPONENT} has no {FIRST_MESSAGE:?}: {log}");
    Ok(())
}

async fn conditions(env: &TestEnv<'_>, node: &Node, claim: &str) -> Result<()> {
    let volume = claims::volume_of(env, claim).await?;
    let csi = volume.spec.and_then(|spec| spec.csi).context("the PersistentVolume has no CSI source")?;
    let volume = csi.volume_handle.as_str();
    for condition in
        [&["plugin-registered"][..], &["quota-enforced"], &["node-ready"], &["volume-published", volume]]
    {
        wait(node, condition, env.timeouts.start).await?;
    }
    anyhow::ensure!(
        !is_met(node, &["volume-published", "absent"]).await?,
        "a volume that is absent is published"
    );
    Ok(())
}

async fn kubectl(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let program = format!("{TOOLS_DIR}/kubectl");
    let kubectl = async |options: &[&str], args: &[&str]| -> Result<ExecOutput> {
        dbg(node, &[&["kubectl", "--kubectl", program.as_str()], options, args].concat()).await
    };
    let pods = kubectl(&[], &["get", "pods", "--all-namespaces", "--output=name"]).await?;
    let driver = env.live_driver_pods().await?;
    let expected = driver.first().context("the driver has no pod")?.name_any();
    anyhow::ensure!(pods.code == 0 && pods.stdout.contains(&expected), "kubectl get pods: {pods:?}");
    let secrets = kubectl(&[], &["get", "secrets", "--namespace=kube-system"]).await?;
    anyhow::ensure!(
        secrets.code != 0 && secrets.stderr.contains("Forbidden") && secrets.stdout.is_empty(),
        "kubectl get secrets: {secrets:?}"
    );
    for (options, reason) in [
        (["--as-account", "admin"], "the service accounts are viewer"),
        (["--lifetime", "24h"], "the lifetime must be"),
    ] {
        let refused = kubectl(&options, &["get", "pods"]).await?;
        anyhow::ensure!(refused.code == 3 && refused.stderr.contains(reason), "{options:?}: {refused:?}");
    }
    Ok(())
}

/// Checks the archive that a failed run stores, with a secret in a log.
async fn bundle(node: &Node) -> Result<()> {
    let dbg = format!("{TOOLS_DIR}/{DBG}");
    let found = node
        .output(&["sh", "-c", LOG_SECRET, "sh", &dbg, &log_file(COMPONENT), SECRET], TOOL_DEADLINE)
        .await?;
    anyhow::ensure!(found.contains(SECRET), "dbg logs prints {found:?}");
    let directory = tempfile::tempdir().context("create a temporary directory")?;
    let path = state_dump::write_bundle(node, directory.path()).await?;
    let archive = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let text = String::from_utf8_lossy(&archive);
    for part in [
        "logs/containerd.log",
        "logs/kubelet.log",
        "logs/kernel.log",
        "conditions.txt",
        "state/quotas.txt",
        FIRST_MESSAGE,
        "the last one: token=[redacted]",
    ] {
        anyhow::ensure!(text.contains(part), "the archive of {} bytes has no {part:?}", archive.len());
    }
    anyhow::ensure!(!text.contains(SECRET), "the archive has the secret");
    Ok(())
}
