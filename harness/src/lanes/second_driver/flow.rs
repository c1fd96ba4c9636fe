//! The mounted part of the main flow: a claim, a pod that writes and reads, kills of the provisioner, and a deletion that leaves
//! nothing. In between, the checks of the capacity.

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use testvm::report::Outcome;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::containers::{self, Container};
use testvm_cluster::exec::{ExecOutput, exec, exec_ok};
use testvm_cluster::leak_check::Entries;
use testvm_cluster::manifests::Manifests;
use testvm_cluster::waiting::{State, until};
use testvm_cluster::workload::{self, Held, PodProgram, VolumeMode};
use testvm_cluster::{Cluster, Node, objects};

use crate::nodes::VOLUME_CHECK;
use crate::test_env::sizes::Size;

/// The directory of the volumes, as in the manifests.
pub(super) const DATA_DIR: &str = "/var/lib/local-path";
/// The names in the manifests.
const DRIVER_NAMESPACE: &str = "local-path-storage";
const DEPLOYMENT: &str = "local-path-provisioner";
const CONTAINER: &str = "local-path-provisioner";
const LABELS: &str = "app=local-path-provisioner";
const CLASS: &str = "local-path";
/// The beginning of the names of the pods that create and delete directories.
const HELPER_PODS: &str = "helper-pod-";

const NAMESPACE: &str = "second-driver";
const CLAIM: &str = "data";
const WRITER: &str = "writer";
const READER: &str = "reader";
const MOUNT: &str = "/vol";
const FILE: &str = "/vol/text";
const TEXT: &str = "written before the provisioner was killed";
const SIZE: Size = Size::mebibytes(1);

/// The timeout of each wait. Every wait ends with its condition, so a timeout is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Why the checks of the capacity must fail.
const NO_SIZE: &str = "local-path enforces no size: a volume is a directory without a quota";

/// Runs all steps and adds each to the report. After a failed step, the others do not run.
pub(super) async fn run(steps: &mut Steps<'_>, cluster: &Cluster, manifests: &Manifests) -> StepResult {
    let node = cluster.node();
    let client = cluster.client();
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);

    steps.step("install the provisioner", install(cluster, manifests)).await?;
    let before = steps.step("list files and mounts", Entries::of_file_system(node, DATA_DIR)).await?;

    steps.step("create a claim of 1Mi and a pod that mounts it", create(cluster, &claims, &pods)).await?;
    let kill = async {
        until_helper_pods(cluster, |count| count > 0, "no pod creates the directory").await?;
        kill_provisioner(cluster, node).await
    };
    let title = "kill the provisioner after it has begun to create the volume";
    let killed = steps.step(title, kill).await?;
    steps.step("the pod runs", workload::until_pod_runs(&pods, WRITER, TIMEOUT)).await?;
    steps.step("the provisioner was started again", replaced(cluster, &killed)).await?;
    let write = async {
        exec_ok(&pods, WRITER, &["/volume-check", "write", FILE, TEXT]).await?;
        reads(&pods, WRITER).await
    };
    steps.step("the pod writes and reads a file", write).await?;

    let (size, volume) = (SIZE.bytes().to_string(), format!("writable:{MOUNT}"));
    let (size, volume) = (size.as_str(), volume.as_str());
    let check_new = ["/volume-check", "check-new", size, "none", volume];
    let check = exec(&pods, WRITER, &check_new);
    steps
        .judged("the volume has the size of the claim", check, |output| judge(output, "total bytes"))
        .await?;
    let check_limit = ["/volume-check", "check-limit", MOUNT, size];
    let check = exec(&pods, WRITER, &check_limit);
    steps.judged("no more than the claim fits", check, |output| judge(output, "which is too many")).await?;

    let kill = kill_provisioner(cluster, node);
    let killed = steps.step("kill the provisioner while the volume is in use", kill).await?;
    let read = async {
        objects::create(&pods, &pod(READER)?).await?;
        workload::until_pod_runs(&pods, READER, TIMEOUT).await?;
        reads(&pods, READER).await
    };
    steps.step("a second pod reads the file", read).await?;
    steps.step("the provisioner was started once more", replaced(cluster, &killed)).await?;
    let end = async {
        objects::remove(pods.clone(), WRITER, TIMEOUT).await?;
        objects::remove(pods, READER, TIMEOUT).await
    };
    steps.step("delete the pods", end).await?;
    let delete = workload::delete_claim(client, &claims, CLAIM, TIMEOUT);
    steps.step("delete the claim and its volume", delete).await?;
    let nothing_left = async {
        until_helper_pods(cluster, |count| count == 0, "there are pods that delete directories").await?;
        Entries::of_file_system(node, DATA_DIR).await?.require_none_added_since(&before)
    };
    steps.step("no file, mount or helper pod is left", nothing_left).await
}

/// Judges a check of the capacity, which must fail with a message that contains `proof`.
fn judge(output: &ExecOutput, proof: &str) -> Outcome {
    let message = output.stderr.trim();
    if output.succeeded {
        Outcome::Failed(format!(
            "it passed, and must not, because {NO_SIZE}; if this version enforces sizes, make it an ordinary check"
        ))
    } else if message.contains(proof) {
        Outcome::ExpectedFailure(format!("{NO_SIZE}\n{message}"))
    } else {
        Outcome::Failed(format!("it failed for another reason than the expected one ({proof}): {message}"))
    }
}

/// Applies the manifests, and waits until the provisioner runs.
async fn install(cluster: &Cluster, manifests: &Manifests) -> Result<()> {
    manifests.apply(cluster.client()).await?;
    workload::until_available(cluster.client(), DRIVER_NAMESPACE, DEPLOYMENT, TIMEOUT).await
}

async fn create(cluster: &Cluster, claims: &Api<PersistentVolumeClaim>, pods: &Api<Pod>) -> Result<()> {
    workload::create_namespace(cluster.client(), NAMESPACE).await?;
    let claim = workload::claim(CLAIM, CLASS, &SIZE.quantity(), VolumeMode::Filesystem, "ReadWriteOnce")?;
    objects::create(claims, &claim).await?;
    objects::create(pods, &pod(WRITER)?).await.map(drop)
}

/// Returns a pod that mounts the claim and does not use it by itself.
fn pod(name: &str) -> Result<Pod> {
    let command = &["/volume-check", "hold"];
    let program = PodProgram { container: "volume-check", image: VOLUME_CHECK, command };
    let held = Held { claim: CLAIM, path: MOUNT, mode: VolumeMode::Filesystem, read_only: false };
    workload::pod(name, program, &[held])
}

/// Checks that the file has the text.
async fn reads(pods: &Api<Pod>, pod: &str) -> Result<()> {
    let read = exec_ok(pods, pod, &["/volume-check", "read", FILE]).await?;
    anyhow::ensure!(read == TEXT, "pod {pod} reads {read:?} instead of {TEXT:?}");
    Ok(())
}

fn driver_pods(cluster: &Cluster) -> Api<Pod> {
    Api::namespaced(cluster.client().clone(), DRIVER_NAMESPACE)
}

/// Waits until the number of the provisioner's helper pods is as expected.
async fn until_helper_pods(cluster: &Cluster, expected: impl Fn(usize) -> bool, pending: &str) -> Result<()> {
    until(driver_pods(cluster), watcher::Config::default(), TIMEOUT, |pods| {
        let helpers = pods.values().filter(|pod| pod.name_any().starts_with(HELPER_PODS)).count();
        State::ready_if(expected(helpers), pending)
    })
    .await
    .map(drop)
}

/// Kills the provisioner, and returns its container.
async fn kill_provisioner(cluster: &Cluster, node: &Node) -> Result<Container> {
    containers::kill_in(node, &driver_pods(cluster), LABELS, CONTAINER).await
}

/// Waits until another container of the provisioner runs.
async fn replaced(cluster: &Cluster, killed: &Container) -> Result<()> {
    let scope = watcher::Config::default().labels(LABELS);
    containers::until_replaced(driver_pods(cluster), scope, std::slice::from_ref(killed), TIMEOUT).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(succeeded: bool, stderr: &str) -> ExecOutput {
        ExecOutput { succeeded, stdout: String::new(), stderr: stderr.to_owned() }
    }

    /// Without the expected reason, the check has found something else.
    #[test]
    fn capacity_check_must_fail_for_expected_reason() {
        let message = "volume-check: 1064960 bytes fit into a volume of 1048576, which is too many\n";
        let expected = format!("{NO_SIZE}\n{}", message.trim());
        let judge = |succeeded, stderr| judge(&output(succeeded, stderr), "which is too many");
        assert_eq!(judge(false, message), Outcome::ExpectedFailure(expected));
        assert!(matches!(judge(true, ""), Outcome::Failed(why) if why.contains("make it an ordinary check")));
        assert!(
            matches!(judge(false, "no such file"), Outcome::Failed(why) if why.contains("another reason"))
        );
    }
}
