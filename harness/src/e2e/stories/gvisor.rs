//! Volumes of pods under gVisor, whose system calls a kernel in user space handles. It opens the files of a volume on
//! the node itself, so limits and sizes are those of the node's kernel.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::{exec, exec_ok};
use testvm_cluster::gvisor::GVISOR_HANDLER;
use testvm_cluster::waiting::until_event;
use testvm_cluster::{Node, objects};

use super::flow::check_mount_options;
use crate::e2e::sabotages::{named, replace_pod};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Held, READ_ONLY_PATH, VolumeMode, WRITABLE_PATH, claim, holder, holder_of};
use crate::test_env::{claims, pods, runtime_classes};

pub(in crate::e2e) const STORY: Story = Story {
    name: "gvisor",
    about: "volumes of pods under gVisor",
    when: When::OtherProjects,
    run: Run::OwnNode(|steps, state, _, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "host-kernel",
        about: "The pod runs on the kernel of the node",
        before: "the kernel that the pod sees is gVisor's",
        change: |env| Box::pin(replace_pod(env, POD, |pod| pod.runtime_class_name = None)),
        repair: None,
        expected: &["the pod runs on"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
const GROWN: Size = Size::mebibytes(4);
/// A StorageClass with the options of the driver's, and `noexec`.
const CLASS: &str = "loopfs-gvisor-noexec";
const POD: &str = "gvisor";
const WRITABLE: &str = "gvisor-default";
const READ_ONLY: &str = "gvisor-readonly";
/// The name of a pod and its claim.
const BLOCK: &str = "gvisor-block";
/// A RuntimeClass with a handler that containerd does not have, and a pod of it.
const ABSENT: &str = "absent-runtime";
const ABSENT_HANDLER: &str = "no-such-handler";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    steps.step("a pod starts under gVisor with two volumes of 1Mi", start(env)).await?;
    steps.step("the pod sees volumes of 1Mi, and no more fits", check(env, &["check-new"], SIZE)).await?;
    steps.step("the kernel that the pod sees is gVisor's", has_its_own_kernel(env)).await?;
    let title = "the node's mounts have the options of the StorageClass";
    steps.step(title, check_mount_options(env, node, POD)).await?;
    steps.step("the claims grow to 4Mi", grow(env)).await?;
    let kept = ["check-kept", &SIZE.bytes().to_string()];
    let checked = check(env, &kept, GROWN);
    steps.step("the pod sees volumes of 4Mi with its data, and no more fits", checked).await?;
    steps.step("no container was restarted for that", never_restarted(env)).await?;
    let title = "a program on the volume is killed, and runs on the root file system of the container";
    steps.step(title, cannot_execute(env)).await?;
    steps
        .step(
            "the project id of the volume can neither be read nor changed: ENOTTY",
            cannot_change_project(env),
        )
        .await?;
    let title =
        "a handler that containerd does not have: the pod's event names it, and the volume stays as it is";
    steps.step(title, absent_handler(env)).await?;
    steps.step("a Block volume: the device is there, and opening it fails with ENXIO", block(env)).await?;
    steps.step("the classes are deleted", delete_classes(env)).await
}

/// Returns a pod under gVisor with the Filesystem volumes of the main flow.
fn checking_pod() -> Result<Pod> {
    let held = |claim, path| Held { claim, path, mode: VolumeMode::Filesystem, read_only: false };
    let mut pod = holder_of(POD, &[held(WRITABLE, WRITABLE_PATH), held(READ_ONLY, READ_ONLY_PATH)])?;
    let containers = &mut pod.spec.get_or_insert_default().containers;
    for mount in containers.iter_mut().flat_map(|container| container.volume_mounts.iter_mut().flatten()) {
        mount.read_only = Some(mount.name == READ_ONLY);
    }
    Ok(of_class(pod, GVISOR_HANDLER))
}

/// Has the test program check the volumes. The flags of the StorageClass are missing: gVisor shows those of the container
/// runtime only.
async fn check(env: &TestEnv<'_>, verb: &[&str], size: Size) -> Result<()> {
    let volumes = [format!("writable:{WRITABLE_PATH}"), format!("readonly:{READ_ONLY_PATH}")];
    pods::check(env, POD, verb, size, pods::NO_FLAGS, &volumes).await
}

fn of_class(mut pod: Pod, runtime_class: &str) -> Pod {
    pod.spec.get_or_insert_default().runtime_class_name = Some(runtime_class.to_owned());
    pod
}

/// Creates the StorageClass of the driver with the mount option `noexec` in addition.
async fn create_noexec_class(env: &TestEnv<'_>) -> Result<()> {
    let mut class = env.driver.class.clone();
    class.metadata = named(CLASS);
    class.mount_options.get_or_insert_default().push("noexec".to_owned());
    objects::create(&classes(env), &class).await.map(drop)
}

fn classes(env: &TestEnv<'_>) -> Api<StorageClass> {
    Api::all(env.client.clone())
}

async fn create_claim(env: &TestEnv<'_>, name: &str, mode: VolumeMode) -> Result<()> {
    let claim = claim(name, CLASS, SIZE, mode, "ReadWriteOnce")?;
    claims::create(env, &claim).await.map(drop)
}

async fn start(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::create(env, GVISOR_HANDLER, GVISOR_HANDLER).await?;
    create_noexec_class(env).await?;
    for name in [WRITABLE, READ_ONLY] {
        create_claim(env, name, VolumeMode::Filesystem).await?;
    }
    pods::create(env, &checking_pod()?).await
}

async fn has_its_own_kernel(env: &TestEnv<'_>) -> Result<()> {
    let version = exec_ok(&env.pods(), POD, &["/volume-check", "read", "/proc/version"]).await?;
    anyhow::ensure!(version.contains("gvisor"), "the pod runs on {version:?}");
    Ok(())
}

async fn grow(env: &TestEnv<'_>) -> Result<()> {
    for name in [WRITABLE, READ_ONLY] {
        claims::request_size(env, name, GROWN).await?;
    }
    for name in [WRITABLE, READ_ONLY] {
        claims::until_expanded(env, name, GROWN).await?;
    }
    Ok(())
}

async fn never_restarted(env: &TestEnv<'_>) -> Result<()> {
    let pod = objects::read(&env.pods(), POD).await?;
    let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
    let restarts: Vec<i32> = statuses.iter().map(|status| status.restart_count).collect();
    anyhow::ensure!(restarts == [0], "the restarts of its containers are {restarts:?}");
    Ok(())
}

/// Checks that the options of the mount on the node protect a pod that does not see them. The node refuses to map the
/// program executable. gVisor has then started it already, and it dies of its first access. The same program runs where
/// the mount does not forbid it, so the option is the cause.
async fn cannot_execute(env: &TestEnv<'_>) -> Result<()> {
    for (directory, expected) in [("/", "executed: exit code 0"), (WRITABLE_PATH, "killed by signal 11")] {
        let result = exec_ok(&env.pods(), POD, &["/volume-check", "execute-copy", directory]).await?;
        anyhow::ensure!(result.trim() == expected, "a program in {directory}: {result}");
    }
    Ok(())
}

/// Checks that a pod under gVisor cannot evade its limit, as one under runc can.
async fn cannot_change_project(env: &TestEnv<'_>) -> Result<()> {
    // gVisor lacks the ioctl.
    pods::cannot_change_project(env, POD, WRITABLE_PATH, "ENOTTY").await
}

/// Starts a pod that shares the volume of the running pod. The kubelet publishes the volume before it asks containerd
/// for the pod, and unpublishes it when the pod is deleted.
async fn absent_handler(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::create(env, ABSENT, ABSENT_HANDLER).await?;
    let pod = of_class(holder(ABSENT, WRITABLE, VolumeMode::Filesystem)?, ABSENT);
    let pod = objects::create(&env.pods(), &pod).await?;
    let expected = format!("no runtime for {ABSENT_HANDLER:?} is configured");
    until_event(&env.client, &pod, &["FailedCreatePodSandBox"], env.timeouts.start, |message| {
        message.contains(&expected)
    })
    .await?;
    pods::end(env, ABSENT).await?;
    runtime_classes::delete(env, ABSENT).await?;
    let kept = format!("{WRITABLE_PATH}/kept");
    pods::check_text(env, POD, &kept, &SIZE.bytes().to_string()).await
}

/// Starts a pod with a Block volume. gVisor creates the device node, and has no driver for its number.
async fn block(env: &TestEnv<'_>) -> Result<()> {
    create_claim(env, BLOCK, VolumeMode::Block).await?;
    pods::create(env, &of_class(holder(BLOCK, BLOCK, VolumeMode::Block)?, GVISOR_HANDLER)).await?;
    let output = exec(&env.pods(), BLOCK, &["/volume-check", "write", "/vol", "text"]).await?;
    anyhow::ensure!(!output.succeeded, "a pod under gVisor wrote to a device: {}", output.stdout);
    anyhow::ensure!(
        output.stderr.contains("/vol: No such device or address"),
        "writing to the device failed with another error than ENXIO: {}",
        output.stderr
    );
    Ok(())
}

async fn delete_classes(env: &TestEnv<'_>) -> Result<()> {
    objects::delete(&classes(env), CLASS).await?;
    runtime_classes::delete(env, GVISOR_HANDLER).await
}
