//! Pods of a story that use a claim.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use testvm_cluster::exec::{ExecOutput, exec, exec_ok};
use testvm_cluster::waiting::{State, until_logged};
use testvm_cluster::{objects, workload};

use super::claims;
use super::environment::TestEnv;
use super::sizes::Size;
use super::workload::{Held, VolumeMode, holder, holder_of};

/// Starts a pod that holds the claim, and waits until it runs.
pub(crate) async fn start(env: &TestEnv<'_>, pod: &str, claim: &str, mode: VolumeMode) -> Result<()> {
    create(env, &holder(pod, claim, mode)?).await
}

/// Starts a pod like [`start`], with a new claim of the same name.
pub(crate) async fn start_new(env: &TestEnv<'_>, name: &str, size: Size, mode: VolumeMode) -> Result<()> {
    claims::request(env, name, size, mode).await?;
    start(env, name, name, mode).await
}

/// Starts a pod that writes to the whole device of the claim without fsync(2), and keeps the device open. Waits until it has written.
pub(crate) async fn start_writing(env: &TestEnv<'_>, pod: &str, claim: &str) -> Result<()> {
    let mut object = holder(pod, claim, VolumeMode::Block)?;
    for container in object.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
        container.command.get_or_insert_default().push(WRITTEN_DEVICE.to_owned());
    }
    create(env, &object).await?;
    until_logged(&env.pods(), pod, None, env.timeouts.start, |line| {
        State::ready_if(line.starts_with("[HOLDING] 1"), format!("its last line is {line:?}"))
    })
    .await
}

/// Checks that the device of a pod's claim has what the pod of [`start_writing`] wrote.
pub(crate) async fn check_written(env: &TestEnv<'_>, pod: &str) -> Result<()> {
    exec_ok(&env.pods(), pod, &["/volume-check", "verify-pattern", WRITTEN_DEVICE]).await.map(drop)
}

/// A project id of no volume: those of the store's volumes are far larger.
const OTHER_PROJECT: &str = "1";
const WRITTEN_DEVICE: &str = "block:/vol";
/// The word of the test program for mounts without flags.
pub(crate) const NO_FLAGS: &str = "none";

/// Starts a pod like [`start`], whose claim is read-only.
pub(crate) async fn start_read_only(
    env: &TestEnv<'_>,
    pod: &str,
    claim: &str,
    mode: VolumeMode,
) -> Result<()> {
    create(env, &holder_of(pod, &[Held { claim, path: "/vol", mode, read_only: true }])?).await
}

/// Creates a pod and waits until it runs.
pub(crate) async fn create(env: &TestEnv<'_>, object: &Pod) -> Result<()> {
    objects::create(&env.pods(), object).await?;
    workload::until_pod_runs(&env.pods(), &object.name_any(), env.timeouts.start).await
}

/// Deletes a pod, and waits until it is deleted and its volumes are unpublished.
pub(crate) async fn end(env: &TestEnv<'_>, pod: &str) -> Result<()> {
    objects::remove(env.pods(), pod, env.timeouts.end).await
}

/// Writes a text from a pod to the beginning of a file or device.
pub(crate) async fn write(env: &TestEnv<'_>, pod: &str, file: &str, text: &str) -> Result<()> {
    exec_ok(&env.pods(), pod, &["/volume-check", "write", file, text]).await.map(drop)
}

/// Checks that the file or device, read in a pod, begins with the text.
pub(crate) async fn check_text(env: &TestEnv<'_>, pod: &str, file: &str, text: &str) -> Result<()> {
    let length = text.len().to_string();
    let read = exec_ok(&env.pods(), pod, &["/volume-check", "read-at", file, &length]).await?;
    anyhow::ensure!(read == text, "pod {pod} reads {read:?} instead of {text:?}");
    Ok(())
}

/// Runs a program in a pod that changes the project id of its volume at `path`, as any owner of a directory can try.
pub(crate) async fn change_project(env: &TestEnv<'_>, pod: &str, path: &str) -> Result<ExecOutput> {
    exec(&env.pods(), pod, &["/loopfs", "quota", "tag", "--id", OTHER_PROJECT, path]).await
}

/// Checks that [`change_project`] fails with this errno.
pub(crate) async fn cannot_change_project(
    env: &TestEnv<'_>,
    pod: &str,
    path: &str,
    errno: &str,
) -> Result<()> {
    let ExecOutput { succeeded, stdout, stderr } = change_project(env, pod, path).await?;
    anyhow::ensure!(!succeeded, "pod {pod} changed the project id of {path}: {stdout}");
    anyhow::ensure!(stderr.contains(&format!("({errno})")), "{path}: expected {errno}: {stderr}");
    Ok(())
}

/// Has the test program in a pod check empty volumes of this size, and write to them.
pub(crate) async fn check_new(
    env: &TestEnv<'_>,
    pod: &str,
    size: Size,
    volumes: &[impl AsRef<str>],
) -> Result<()> {
    check(env, pod, &["check-new"], size, &enforced_flags(&env.driver.class), volumes).await
}

/// Has the test program check what [`check_new`] wrote at the first of `sizes`, and the size and the limit of the volumes,
/// which are the second. It writes to them again.
pub(crate) async fn check_kept(
    env: &TestEnv<'_>,
    pod: &str,
    [before, size]: [Size; 2],
    volumes: &[impl AsRef<str>],
) -> Result<()> {
    let verb = ["check-kept", &before.bytes().to_string()];
    check(env, pod, &verb, size, &enforced_flags(&env.driver.class), volumes).await
}

/// Has the test program check volumes whose mounts have these flags in the pod, or [`NO_FLAGS`].
pub(crate) async fn check(
    env: &TestEnv<'_>,
    pod: &str,
    verb: &[&str],
    size: Size,
    flags: &str,
    volumes: &[impl AsRef<str>],
) -> Result<()> {
    let size = size.bytes().to_string();
    let words = ["/volume-check"].into_iter().chain(verb.iter().copied()).chain([size.as_str(), flags]);
    let argv: Vec<&str> = words.chain(volumes.iter().map(AsRef::as_ref)).collect();
    exec_ok(&env.pods(), pod, &argv).await.map(drop)
}

/// Returns those of the class's mount options that restrict a program and that it can see on its mount.
fn enforced_flags(class: &StorageClass) -> String {
    let options = class.mount_options.iter().flatten().map(String::as_str);
    let flags: Vec<&str> =
        options.filter(|option| matches!(*option, "nosuid" | "nodev" | "noexec")).collect();
    if flags.is_empty() { NO_FLAGS.to_owned() } else { flags.join(",") }
}
