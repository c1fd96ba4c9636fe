//! node-debug and dbg on a node with a real containerd, kubelet, API server and driver.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Node, TOOLS_DIR, log_file, objects};
use testvm_guest::control::ExecOutput;

use crate::e2e::state_dump;
use crate::nodes::DBG;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::node_debug::{grant_driver_logs, is_met, run as dbg, wait};

/// The poll interval for rights.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The component whose log the story reads and writes.
const COMPONENT: &str = "containerd";
/// What containerd logs first.
const FIRST_MESSAGE: &str = "starting containerd";

/// A secret that no program uses.
const SECRET: &str = "hunter2-of-the-story-node";
/// Appends lines with the secret to the log `$2` with the file `$3`, and waits until node-debug has the last of them. A
/// further line ends dbg, whose reader has gone by then. Each line is one write, as `/dev/kmsg` needs it.
const LOG_SECRET: &str = "set -e
for line in \"{\\\"password\\\":\\\"$4\\\"}\" \"Authorization: Bearer $4\" \"the last one: token=$4\"; do
  printf '%s\\n' \"$line\" >> \"$3\"
done
\"$1\" logs \"$2\" --follow | {
  grep --max-count=1 --fixed-strings \"the last one: token=$4\"
  exec 0<&-
  echo 'the secret was found' >> \"$3\"
}";
/// The components whose logs get the secret.
const LOGS: [&str; 3] = [COMPONENT, "kubelet", "kernel"];
/// The mount point of a file system whose source has the secret.
const SECRET_MOUNT: &str = "/run/secret-of-the-story-node";
const MOUNT: &str = "/usr/bin/mount";
const UMOUNT: &str = "/usr/bin/umount";

/// Runs while a pod uses `claim`.
pub(in crate::e2e) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    claim: &str,
) -> StepResult {
    steps
        .step("dbg condition wait finds the driver, the quotas, the node and the volume", async {
            conditions(env, node, claim).await
        })
        .await?;
    steps.step("dbg kubectl lists pods and volumes, and is refused secrets", kubectl(env, node)).await?;
    let logs = driver_logs(steps.session(), env, node);
    steps.step("dbg kubectl prints logs of the driver once that is granted, and no others", logs).await?;
    steps.step("dbg bundle arrives with the logs and without a secret in them", bundle(node)).await
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

/// Runs `dbg kubectl` with arguments of kubectl.
async fn run_kubectl(node: &Node, args: &[&str]) -> Result<ExecOutput> {
    let program = format!("{TOOLS_DIR}/kubectl");
    dbg(node, &[&["kubectl", "--kubectl", program.as_str()], args].concat()).await
}

fn is_forbidden(output: &ExecOutput) -> bool {
    output.code != 0 && output.stderr.contains("Forbidden") && output.stdout.is_empty()
}

async fn driver_pod(env: &TestEnv<'_>) -> Result<Pod> {
    env.live_driver_pods().await?.into_iter().next().context("the driver has no pod")
}

async fn kubectl(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let kinds = "pods,persistentvolumes,nodes,storageclasses,csinodes";
    let listed = run_kubectl(node, &["get", kinds, "--all-namespaces", "--output=name"]).await?;
    let driver = format!("pod/{}", driver_pod(env).await?.name_any());
    for object in [&driver, "persistentvolume/", "node/", "storageclass.", "csinode."] {
        let found = listed.stdout.lines().any(|line| line.starts_with(object));
        anyhow::ensure!(listed.code == 0 && found, "kubectl get {kinds} prints no {object}: {listed:?}");
    }
    let refused = run_kubectl(node, &["get", "secrets,configmaps", "--namespace=kube-system"]).await?;
    let names = |kind: &str| refused.stderr.contains(&format!("{kind} is forbidden"));
    anyhow::ensure!(
        is_forbidden(&refused) && names("secrets") && names("configmaps"),
        "kubectl get secrets,configmaps: {refused:?}"
    );
    Ok(())
}

/// Checks the rights of the account in the namespace of the driver. The story has pods in another one.
async fn driver_logs(session: &Session, env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let driver = driver_pod(env).await?;
    let namespace = driver.namespace().context("the driver's pod has no namespace")?;
    let log = async |namespace: &str, pod: &str| {
        let namespace = format!("--namespace={namespace}");
        run_kubectl(node, &["logs", &namespace, pod, "--all-containers", "--tail=1"]).await
    };
    let before = log(&namespace, &driver.name_any()).await?;
    anyhow::ensure!(is_forbidden(&before), "without driver-logs.yaml: {before:?}");
    grant_driver_logs(session, &env.client).await?;
    let deadline = Instant::now() + env.timeouts.start;
    loop {
        let granted = log(&namespace, &driver.name_any()).await?;
        if granted.code == 0 && !granted.stdout.is_empty() {
            break;
        }
        // No event announces that the API server's authorizer has read the RoleBinding.
        anyhow::ensure!(Instant::now() < deadline, "with driver-logs.yaml: {granted:?}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let pods = objects::list(&env.pods(), "").await?;
    let other = pods.first().context("there is no pod of the story")?;
    let refused = log(&env.namespace, &other.name_any()).await?;
    anyhow::ensure!(is_forbidden(&refused), "the log of another pod: {refused:?}");
    Ok(())
}

/// Checks the archive that a failed run stores, with a secret in logs and in the mount table.
async fn bundle(node: &Node) -> Result<()> {
    let dbg = format!("{TOOLS_DIR}/{DBG}");
    for component in LOGS {
        let file = if component == "kernel" { "/dev/kmsg".to_owned() } else { log_file(component) };
        let found = node.output(&["sh", "-c", LOG_SECRET, "sh", &dbg, component, &file, SECRET]).await?;
        anyhow::ensure!(found.contains(SECRET), "dbg logs {component} prints {found:?}");
    }
    let source = format!("https://user:{SECRET}@example.invalid/");
    let (mount, umount) = (node.inspection_program(MOUNT), node.inspection_program(UMOUNT));
    node.output(&["mkdir", "-p", SECRET_MOUNT]).await?;
    node.output(&[&mount, "-t", "tmpfs", &source, SECRET_MOUNT]).await?;
    let checked = check_bundle(node).await;
    node.output(&[&umount, SECRET_MOUNT]).await?;
    checked
}

async fn check_bundle(node: &Node) -> Result<()> {
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
        "state/mountinfo.txt",
        FIRST_MESSAGE,
        "https://user:[redacted]@example.invalid/",
    ] {
        anyhow::ensure!(text.contains(part), "the archive of {} bytes has no {part:?}", archive.len());
    }
    let redacted = text.matches("the last one: token=[redacted]").count();
    anyhow::ensure!(redacted == LOGS.len(), "{redacted} logs of the archive have the line of the secret");
    anyhow::ensure!(!text.contains(SECRET), "the archive has the secret");
    Ok(())
}
