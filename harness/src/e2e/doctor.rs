//! `loopfs doctor` on a node and in the driver's containers: it must find nothing missing where the driver serves. Its output is
//! stored beside the report.

use std::fs;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde::Deserialize;
use testvm_cluster::exec::{ExecOutput, exec_in};
use testvm_cluster::workload::node_of;
use testvm_cluster::{KUBELET_ROOT, Node, TOOLS_DIR};

use crate::nodes::{DATA_DIR, LOOPFS_TOOL};
use crate::test_env::environment::{DOCTOR, TestEnv};

/// The container of the driver that mounts volumes, and the tool in its image.
const CONTAINER: &str = "csi";
const TOOL_OF_IMAGE: &str = "/loopfs";
/// The arguments of that container that the tool takes, too.
const SHARED_ARGUMENTS: [&str; 2] = ["--data-dir=", "--kubelet-dir="];

/// The checks that must be possible, besides lacking nothing.
const POSSIBLE: [&str; 4] = ["loop-control", "data-dir", "data-dir-quota", "propagation"];

/// The output of the tool in JSON.
#[derive(Debug, Deserialize)]
struct Checks {
    missing: usize,
    checks: Vec<Check>,
}

#[derive(Debug, Deserialize)]
struct Check {
    id: String,
    status: String,
    found: String,
}

/// Runs the tool in the csi container of each pod of the driver, through the API server.
pub(super) async fn in_containers(env: &TestEnv<'_>) -> Result<()> {
    let pods = env.live_driver_pods().await?;
    for pod in &pods {
        let name = pod.name_any();
        let node = node_of(pod).unwrap_or(&name);
        let directories = directories(pod)?;
        let argv = [TOOL_OF_IMAGE, "--json", "doctor"].into_iter();
        let argv: Vec<&str> = argv.chain(directories.iter().map(String::as_str)).collect();
        let ExecOutput { succeeded, stdout, stderr } =
            exec_in(&env.driver_pods(), &name, CONTAINER, &argv).await?;
        store(env, &format!("{CONTAINER}-{node}"), &stdout)?;
        judge(succeeded, &stdout)
            .with_context(|| format!("loopfs doctor in {CONTAINER} of {name}: {stdout}{stderr}"))?;
    }
    Ok(())
}

/// Runs the tool on a node of the harness's own.
pub(super) async fn on_node(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let tool = format!("{TOOLS_DIR}/{LOOPFS_TOOL}");
    let argv = [&tool, "--json", "doctor", "--data-dir", DATA_DIR, "--kubelet-dir", KUBELET_ROOT];
    let output = node.exec(&argv).await?;
    store(env, &format!("node-{}", node.name()), &output.stdout)?;
    judge(output.code == 0, &output.stdout)
        .with_context(|| format!("loopfs doctor on {}: {}{}", node.name(), output.stdout, output.stderr))
}

/// Returns the arguments with which the driver's container names its directories.
fn directories(pod: &Pod) -> Result<Vec<String>> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut csi = containers.filter(|container| container.name == CONTAINER);
    let container = csi.next().with_context(|| format!("pod {} has no {CONTAINER}", pod.name_any()))?;
    let arguments = container.args.iter().flatten();
    let shared = |argument: &&String| SHARED_ARGUMENTS.iter().any(|name| argument.starts_with(name));
    let directories: Vec<_> = arguments.filter(shared).cloned().collect();
    anyhow::ensure!(directories.len() == SHARED_ARGUMENTS.len(), "{CONTAINER} has only {directories:?}");
    Ok(directories)
}

/// Fails if the tool reports that something is missing, or could not check what the driver uses.
fn judge(succeeded: bool, output: &str) -> Result<()> {
    let Checks { missing, checks } =
        serde_json::from_str(output).with_context(|| format!("the output is no report: {output}"))?;
    let is_ok = |id: &str| checks.iter().any(|check| check.id == id && check.status == "ok");
    let lacking = checks.iter().filter(|check| check.status == "missing");
    let lacking: Vec<_> = lacking.map(|Check { id, found, .. }| format!("{id} ({found})")).collect();
    anyhow::ensure!(succeeded && missing == 0 && lacking.is_empty(), "something is missing: {lacking:?}");
    let open: Vec<_> = POSSIBLE.into_iter().filter(|id| !is_ok(id)).collect();
    anyhow::ensure!(open.is_empty(), "{open:?} are not ok");
    Ok(())
}

/// Writes the output into the directory of the report, if there is one.
fn store(env: &TestEnv<'_>, name: &str, output: &str) -> Result<()> {
    let Some(reports) = &env.reports else { return Ok(()) };
    let directory = reports.join(DOCTOR);
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let path = directory.join(format!("{name}.json"));
    fs::write(&path, output).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn checks(changed: &str, status: &str) -> String {
        let check = |id: &str| {
            let status = if id == changed { status } else { "ok" };
            json!({"id": id, "status": status, "found": "", "remedy": null})
        };
        let checks: Vec<_> = POSSIBLE.into_iter().chain(["sysfs"]).map(check).collect();
        json!({"missing": usize::from(status == "missing"), "checks": checks}).to_string()
    }

    /// Nothing may be missing, and the requirements of the driver must have been checked.
    #[rstest]
    #[case::complete(true, checks("", ""), "")]
    #[case::warning(true, checks("sysfs", "warning"), "")]
    #[case::missing(false, checks("sysfs", "missing"), "sysfs")]
    #[case::not_checked(true, checks("propagation", "not_checked"), "propagation")]
    #[case::failed(false, checks("", ""), "missing")]
    #[case::no_tool(false, "exec: no such file".to_owned(), "no such file")]
    fn only_complete_doctor_report_passes(
        #[case] succeeded: bool,
        #[case] output: String,
        #[case] reason: &str,
    ) {
        let error = judge(succeeded, &output).err().map(|error| format!("{error:#}"));
        assert_eq!(error.is_none(), reason.is_empty(), "{error:?}");
        assert!(error.unwrap_or_default().contains(reason));
    }
}
