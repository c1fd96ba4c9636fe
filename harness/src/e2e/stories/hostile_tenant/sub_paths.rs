//! Paths in a volume that lead out of it, as `subPath` and `subPathExpr` of containers, and another `fsGroup`, for which the
//! kubelet changes the owner of every file of the volume.

use anyhow::Result;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, EnvVar, Pod, VolumeMount};
use testvm::excerpt::list;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until_one};

use super::tenants::{HOSTILE, Tenants, directory_of, of_user};
use crate::nodes::VOLUME_CHECK;
use crate::test_env::workload::{VolumeMode, holder};

const POD: &str = "hostile-paths";
/// The container whose path stays in the volume.
const INSIDE: &str = "inside";
/// The links of the volume that lead out of it, as the test program plants them.
const OUTSIDE: [&str; 6] = ["directory", "file", "root", "up", "chain", "loop"];
/// Values of a variable in `subPathExpr`, by the name of the container.
const EXPANDED: [(&str, &str); 2] = [("expanded-up", "../../../../etc"), ("expanded-absolute", "/etc")];
const VARIABLE: &str = "HOSTILE";
/// Another group than that of the pod that wrote the files.
const GROUP: i64 = 3000;

/// The path in the volume of a container.
enum SubPath<'a> {
    Literal(&'a str),
    Expression(&'a str),
}

pub(super) async fn run(steps: &mut Steps<'_>, tenants: &Tenants<'_>) -> StepResult {
    let title = "the kubelet starts no container whose subPath leads out of the volume";
    steps.step(title, stay_inside(tenants)).await?;
    let title = "fsGroup: the files of the volume have the group, and no file outside";
    steps.step(title, grouped(tenants)).await
}

fn container(name: &str, path: SubPath<'_>, value: &str) -> Container {
    let (sub_path, sub_path_expr) = match path {
        SubPath::Literal(path) => (Some(path.to_owned()), None),
        SubPath::Expression(path) => (None, Some(path.to_owned())),
    };
    let mount = VolumeMount {
        name: HOSTILE.into(),
        mount_path: "/vol".into(),
        sub_path,
        sub_path_expr,
        ..VolumeMount::default()
    };
    Container {
        name: name.into(),
        image: Some(VOLUME_CHECK.into()),
        image_pull_policy: Some("Never".into()),
        command: Some(["/volume-check", "hold"].map(str::to_owned).into()),
        env: Some(vec![EnvVar { name: VARIABLE.into(), value: Some(value.into()), ..EnvVar::default() }]),
        volume_mounts: Some(vec![mount]),
        ..Container::default()
    }
}

fn pod(containers: Vec<Container>) -> Result<Pod> {
    let mut pod = holder(POD, HOSTILE, VolumeMode::Filesystem)?;
    pod.spec.get_or_insert_default().containers = containers;
    Ok(of_user(pod, GROUP))
}

/// Starts a container for each path, and waits until the one inside the volume runs and the kubelet has refused all others.
async fn stay_inside(tenants: &Tenants<'_>) -> Result<()> {
    let links = [INSIDE].into_iter().chain(OUTSIDE);
    let links = links.map(|link| container(link, SubPath::Literal(&format!("links/{link}")), ""));
    let expression = format!("$({VARIABLE})");
    let expanded =
        EXPANDED.iter().map(|(name, value)| container(name, SubPath::Expression(&expression), value));
    let containers: Vec<Container> = links.chain(expanded).collect();
    let count = containers.len();
    objects::create(&tenants.env.pods(), &pod(containers)?).await?;
    until_one(tenants.env.pods(), POD, tenants.env.timeouts.start, |pod: Option<&Pod>| {
        let statuses: Vec<&ContainerStatus> = pod
            .iter()
            .flat_map(|pod| &pod.status)
            .flat_map(|status| status.container_statuses.iter().flatten())
            .collect();
        if let Some(escaped) = statuses.iter().find(|status| status.name != INSIDE && has_run(status)) {
            return State::Failed(format!("container {} was started: {:?}", escaped.name, escaped.state));
        }
        let missing: Vec<String> = statuses.iter().filter_map(|status| complaint(status)).collect();
        State::ready_if(
            statuses.len() == count && missing.is_empty(),
            format!("of {} containers: {}", statuses.len(), list(&missing)),
        )
    })
    .await
    .map(drop)
}

fn has_run(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.running.is_some() || state.terminated.is_some())
}

/// Returns what is missing until a container is in the state that it must have.
fn complaint(status: &ContainerStatus) -> Option<String> {
    if status.name == INSIDE {
        return (!has_run(status)).then(|| format!("{INSIDE} does not run: {:?}", status.state));
    }
    let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
    let refused = waiting.is_some_and(|waiting| {
        let message = waiting.message.as_deref().unwrap_or_default();
        waiting.reason.as_deref() == Some("CreateContainerConfigError")
            && (message.contains("subPath") || message.contains("SubPath"))
    });
    (!refused).then(|| format!("{} is not refused: {waiting:?}", status.name))
}

/// Checks the groups on the node. The links lead to the other tenant's volume and to a key of the node.
async fn grouped(tenants: &Tenants<'_>) -> Result<()> {
    let volume = directory_of(tenants.env, HOSTILE).await?;
    let not_grouped = ["find", &volume, "!", "-group", &GROUP.to_string()];
    let not_grouped = tenants.node.output(&not_grouped).await?;
    anyhow::ensure!(not_grouped.is_empty(), "these files do not have the group {GROUP}: {not_grouped:?}");
    let key = ["stat", "--format", "%u:%g %a", "/etc/kubernetes/kubelet.key"];
    let key = tenants.node.output(&key).await?;
    anyhow::ensure!(key.trim() == "0:0 600", "the kubelet's key has the owner and mode {key:?}");
    tenants.check_other_state().await
}
