//! The node loses its power while many volumes are in use, and boots again on the same disks.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::{Api, ResourceExt};
use testvm::excerpt::list;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::containers::Container;
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::workload::node_of;
use testvm_cluster::{Node, objects};
use tokio::time::{Instant, sleep};

use crate::e2e::parts::serving;
use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::disturbances::{cut_power, until_replaced};
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::users::{User, is_ready, start, until_pods};
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const STORY: Story = Story {
    name: "power-cut",
    about: "the power of a node is cut while 50 volumes are in use",
    when: When::Long,
    run: Run::OwnNode(|steps, state, _, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "unsynced",
        about: "The data written before the power cut is not synced",
        before: "cut the power",
        change: |env| Box::pin(unsync(env)),
        repair: None,
        expected: &["is not what was written", "/vol/power-cut-"],
    }],
};

const SIZE: Size = Size::mebibytes(1);

/// The poll interval: no event announces that the kubelet has cleaned up after a boot.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Limits the time from a ready driver to running pods. The kubelet's earlier mounts have failed, and it waits up to two minutes
/// before it retries. Then it starts all pods concurrently.
const RESTART_TIMEOUT: Duration = Duration::from_secs(420);

/// The volumes in use: claims of several pods, mounted and block in turn.
const PODS: usize = 5;
const CLAIMS_EACH: usize = 10;

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let users = users();
    let volumes = PODS * CLAIMS_EACH;
    let title = format!("{PODS} pods run with {volumes} volumes, half of them block volumes");
    let before = steps.step(&title, start(env, &users, SIZE)).await?;
    steps
        .step("each volume is written to, and synced", volume_check(env, &users, "write-pattern", &[]))
        .await?;
    let held = steps.step("what the node holds is what the pods use", settled(env, node, None)).await?;
    let (boot, containers) = steps.step("cut the power", cut(env, node)).await?;
    steps.step("the node boots on the same disks", booted(env, node, &boot)).await?;
    let served = async {
        until_replaced(env, &containers).await?;
        serving::served(env).await
    };
    steps.step("the driver serves", served).await?;
    steps.step("the kubelet brings every pod back", back(env, &users, &before)).await?;
    steps
        .step("every volume has what was written to it", volume_check(env, &users, "verify-pattern", &[]))
        .await?;
    steps
        .step(
            "loop devices, mounts, project ids and files are those of the volumes in use",
            settled(env, node, Some(&held)),
        )
        .await
        .map(drop)
}

fn users() -> Vec<User> {
    let user = |pod: usize| {
        let name = format!("power-cut-{pod}");
        let claims = (0..CLAIMS_EACH).map(|claim| {
            let mode = if claim % 2 == 0 { VolumeMode::Filesystem } else { VolumeMode::Block };
            (format!("{name}-{claim}"), mode)
        });
        User { claims: claims.collect(), name }
    };
    (0..PODS).map(user).collect()
}

fn container(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()?.container_id.as_deref()
}

/// Has the data that the pods wrote in memory only. The power cut must lose it.
async fn unsync(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, "rm -r DATA/volumes/*/*; sync").await?;
    volume_check(env, &users(), "write-pattern", &["--unsynced"]).await
}

/// Runs the test program with all volumes in each pod.
async fn volume_check(env: &TestEnv<'_>, users: &[User], verb: &str, options: &[&str]) -> Result<()> {
    try_join_all(users.iter().map(async |user| {
        let volumes = user.volumes();
        let volumes = volumes.iter().map(String::as_str);
        let argv: Vec<&str> =
            ["/volume-check", verb].into_iter().chain(options.iter().copied()).chain(volumes).collect();
        exec_ok(&env.pods(), &user.name, &argv).await
    }))
    .await
    .map(drop)
}

/// Cuts the power, and returns the id of the boot that it ended, with the driver's containers. The API shows them as running until the
/// kubelet of the next boot has reported others.
async fn cut(env: &TestEnv<'_>, node: &Node) -> Result<(String, Vec<Container>)> {
    let pods = env.live_driver_pods().await?;
    let on_node = pods.iter().filter(|pod| node_of(pod) == Some(node.name()));
    let containers = on_node.flat_map(Container::all).filter_map(|(container, _)| container).collect();
    let nodes: Api<NodeObject> = Api::all(env.client.clone());
    let object = objects::read(&nodes, node.name()).await?;
    cut_power(env, node).await?;
    let boot = boot_id(&object).context("the Node does not say which boot it is of")?;
    Ok((boot.to_owned(), containers))
}

async fn booted(env: &TestEnv<'_>, node: &Node, before: &str) -> Result<()> {
    node.boot().await?;
    until_one::<NodeObject>(Api::all(env.client.clone()), node.name(), env.timeouts.start, |object| {
        let rebooted = object.and_then(boot_id).is_some_and(|boot| boot != before);
        State::ready_if(rebooted, "its kubelet has not reported the new boot")
    })
    .await
    .map(drop)
}

fn boot_id(node: &NodeObject) -> Option<&str> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    Some(&info.boot_id)
}

/// Waits until the same pods run in new containers.
async fn back(env: &TestEnv<'_>, users: &[User], before: &[Pod]) -> Result<()> {
    until_pods(env, users, RESTART_TIMEOUT, |pod| {
        let Some(before) = before.iter().find(|before| before.uid() == pod.uid()) else {
            return Some("has been replaced by another of its name".into());
        };
        if container(pod) == container(before) {
            return Some("has not been started again".into());
        }
        (!is_ready(pod)).then(|| "is not ready".into())
    })
    .await
    .map(drop)
}

/// Waits until the node has exactly one loop device for each block volume in use, and, if `before` is given,
/// exactly the entries in it. Returns the node's inventory.
async fn settled(env: &TestEnv<'_>, node: &Node, before: Option<&Inventory>) -> Result<Inventory> {
    let in_use = block_volumes(env).await?;
    let deadline = Instant::now() + env.timeouts.end;
    loop {
        let held = Inventory::take(node).await?;
        let mut complaints = attachment_errors(&in_use, held.attached());
        if let Some(before) = before {
            complaints.extend(held.added_since(before).into_iter().map(|more| format!("leaked: {more}")));
            complaints.extend(before.added_since(&held).into_iter().map(|less| format!("lost: {less}")));
        }
        if complaints.is_empty() {
            return Ok(held);
        }
        anyhow::ensure!(Instant::now() < deadline, "{}", list(&complaints));
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns a message for each volume without exactly one loop device, and for each other device. The path of
/// an image contains the volume's id.
fn attachment_errors(in_use: &BTreeSet<String>, attached: &[String]) -> Vec<String> {
    let of = |volume: &str| attached.iter().filter(|image| image.contains(volume)).count();
    let mut complaints: Vec<String> = in_use
        .iter()
        .filter(|volume| of(volume) != 1)
        .map(|volume| format!("block volume {volume} is in use and has {} loop devices", of(volume)))
        .collect();
    let idle = attached.iter().filter(|image| !in_use.iter().any(|volume| image.contains(volume.as_str())));
    complaints.extend(idle.map(|image| format!("leaked: a loop device of {image}, which no pod uses")));
    complaints
}

/// Returns the ids of the block volumes. The pods of the story use all volumes of the cluster.
async fn block_volumes(env: &TestEnv<'_>) -> Result<BTreeSet<String>> {
    let volumes = objects::list(&claims::volumes(env), "").await?;
    let specs = volumes.into_iter().filter_map(|volume| volume.spec);
    let block = specs.filter(|spec| spec.volume_mode.as_deref() == Some("Block"));
    Ok(block.filter_map(|spec| Some(spec.csi?.volume_handle)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every claim has a path of its own.
    #[test]
    fn half_of_claims_are_block_volumes() {
        let users = users();
        let claims: Vec<_> = users.iter().flat_map(|user| &user.claims).collect();
        assert_eq!(claims.len(), 50);
        assert_eq!(claims.iter().filter(|(_, mode)| *mode == VolumeMode::Block).count(), 25);
        let volumes: BTreeSet<String> = users.iter().flat_map(User::volumes).collect();
        assert_eq!(volumes.len(), 50);
        let pod = users[1].pod().unwrap().spec.unwrap();
        assert_eq!(pod.volumes.map(|volumes| volumes.len()), Some(10));
        assert_eq!(pod.containers[0].volume_devices.as_ref().map(Vec::len), Some(5));
    }

    /// A device can be missing, duplicate or leaked.
    #[test]
    fn wrong_loop_device_counts_are_reported() {
        let in_use = BTreeSet::from(["pvc-1".to_owned(), "pvc-2".to_owned()]);
        let judge = |images: &[&str]| {
            attachment_errors(&in_use, &images.iter().map(|image| (*image).to_owned()).collect::<Vec<_>>())
        };
        assert!(judge(&["/d/pvc-1/image", "/d/pvc-2/image"]).is_empty());
        assert_eq!(judge(&["/d/pvc-1/image"]), ["block volume pvc-2 is in use and has 0 loop devices"]);
        let twice = judge(&["/d/pvc-1/image", "/d/pvc-1/image", "/d/pvc-2/image"]);
        assert_eq!(twice, ["block volume pvc-1 is in use and has 2 loop devices"]);
        let idle = judge(&["/d/pvc-1/image", "/d/pvc-2/image", "/d/pvc-3/image (deleted)"]);
        assert_eq!(idle, ["leaked: a loop device of /d/pvc-3/image (deleted), which no pod uses"]);
    }
}
