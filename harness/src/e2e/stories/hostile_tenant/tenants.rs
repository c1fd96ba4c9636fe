//! The two tenants: their pods, claims and volumes, and what the node shows of the other tenant's volume.

use anyhow::Result;
use k8s_openapi::api::core::v1::{Pod, PodSecurityContext};
use kube::ResourceExt;
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::{State, until_event, until_logged};
use testvm_cluster::workload::{self, PodProgram};
use testvm_cluster::{Node, TOOLS_DIR, objects};

use crate::nodes::{DATA_DIR, LOOPFS_TOOL, VOLUME_CHECK};
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Held, VolumeMode, claim, create_namespace, holder_of};
use crate::test_env::{claims, pods};

const SIZE: Size = Size::mebibytes(4);
pub(super) const GROWN: Size = Size::mebibytes(8);

/// The pod of the hostile tenant and its claims.
pub(super) const HOSTILE: &str = "hostile";
const DEEP: &str = "hostile-deep";
/// The other tenant, in a namespace of its own.
pub(super) const OTHER: &str = "other-tenant";
/// The first group of the hostile tenant's files, as the pod's `fsGroup` requests it.
const GROUP: i64 = 2000;
const USER: i64 = 1000;

/// The hostile tenant's pods and volumes on one node, beside another tenant's.
pub(super) struct Tenants<'a> {
    pub(super) env: &'a TestEnv<'a>,
    pub(super) node: &'a Node,
    /// The environment of the other tenant's namespace.
    pub(super) other: &'a TestEnv<'a>,
    pub(super) other_volume: String,
    /// The quota and the owners of the other tenant's volume, as the node shows them before the attack.
    other_before: String,
    pub(super) inventory: Inventory,
}

pub(super) async fn move_in<'a>(
    env: &'a TestEnv<'a>,
    node: &'a Node,
    other: &'a TestEnv<'a>,
) -> Result<Tenants<'a>> {
    create_namespace(&other.client, &other.namespace).await?;
    pods::start_new(other, OTHER, SIZE, VolumeMode::Filesystem).await?;
    exec_ok(&other.pods(), OTHER, &["/volume-check", "write-pattern", "writable:/vol"]).await?;
    let other_volume = directory_of(other, OTHER).await?;
    let other_before = state(node, &other_volume).await?;
    Ok(Tenants { env, node, other, other_volume, other_before, inventory: Inventory::take(node).await? })
}

/// Returns the directory of a claim's volume on the node.
pub(super) async fn directory_of(env: &TestEnv<'_>, claim: &str) -> Result<String> {
    Ok(format!("{DATA_DIR}/volumes/{}", claims::volume_of(env, claim).await?.name_any()))
}

/// Returns the quota of a volume, and the owner and mode of each of its files, as the node shows them.
async fn state(node: &Node, directory: &str) -> Result<String> {
    // Delayed allocation is charged when it is written.
    node.output(&["sync", "--file-system", DATA_DIR]).await?;
    let quota = quota(node, directory).await?;
    let files = node.output(&["find", directory, "-printf", "%U:%G %m %s %p\n"]).await?;
    Ok(format!("{quota}{files}"))
}

/// Returns the quota of a volume, as the tool of loopfs prints it in JSON.
pub(super) async fn quota(node: &Node, directory: &str) -> Result<String> {
    let tool = format!("{TOOLS_DIR}/{LOOPFS_TOOL}");
    node.output(&[&tool, "--json", "quota", "show", directory]).await
}

/// Has the pod run as a user without privileges, whose files have a group.
pub(super) fn of_user(mut pod: Pod, group: i64) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    spec.restart_policy = Some("Never".into());
    spec.security_context = Some(PodSecurityContext {
        run_as_user: Some(USER),
        run_as_group: Some(USER),
        fs_group: Some(group),
        ..PodSecurityContext::default()
    });
    pod
}

impl Tenants<'_> {
    pub(super) async fn plant(&self) -> Result<()> {
        let class = self.env.driver.class_name();
        for (name, access) in [(HOSTILE, "ReadWriteOnce"), (DEEP, "ReadWriteOncePod")] {
            claims::create(self.env, &claim(name, &class, SIZE, VolumeMode::Filesystem, access)?).await?;
        }
        let held = [(HOSTILE, "/vol"), (DEEP, "/deep")].map(|(claim, path)| Held {
            claim,
            path,
            mode: VolumeMode::Filesystem,
            read_only: false,
        });
        let command = &["/volume-check", "plant", "/vol", "/deep", &self.other_volume];
        let program = PodProgram { container: "volume-check", image: VOLUME_CHECK, command };
        pods::create(self.env, &of_user(workload::pod(HOSTILE, program, &held)?, GROUP)).await?;
        until_logged(&self.env.pods(), HOSTILE, None, self.env.timeouts.start, |line| {
            State::ready_if(line == "[PLANTED]", format!("its last line is {line:?}"))
        })
        .await
    }

    /// Starts a second pod on the node itself, where the scheduler does not refuse it.
    pub(super) async fn second_pod(&self) -> Result<()> {
        const SECOND: &str = "hostile-second";
        let held = [Held { claim: DEEP, path: "/deep", mode: VolumeMode::Filesystem, read_only: false }];
        let mut pod = holder_of(SECOND, &held)?;
        pod.spec.get_or_insert_default().node_name = Some(self.node.name().to_owned());
        objects::create(&self.env.pods(), &pod).await?;
        let pod = self.env.pods().get(SECOND).await?;
        let refused = |message: &str| message.contains("ReadWriteOncePod");
        until_event(&self.env.client, &pod, &["FailedMount"], self.env.timeouts.start, refused).await?;
        let phase = self.env.pods().get(SECOND).await?.status.and_then(|status| status.phase);
        anyhow::ensure!(phase.as_deref() == Some("Pending"), "the second pod is {phase:?}");
        pods::end(self.env, SECOND).await
    }

    pub(super) async fn check_other_data(&self) -> Result<()> {
        let argv = ["/volume-check", "verify-pattern", "writable:/vol"];
        exec_ok(&self.other.pods(), OTHER, &argv).await.map(drop)
    }

    pub(super) async fn check_other_state(&self) -> Result<()> {
        let (now, before) = (state(self.node, &self.other_volume).await?, &self.other_before);
        anyhow::ensure!(now == *before, "the other tenant's volume was {before} and is {now}");
        Ok(())
    }
}
