//! The limit of a Filesystem volume, as a pod meets it that is root on its volume: cooperative in the host's user namespace,
//! hard in a user namespace of the pod's own (`hostUsers: false`).

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};

use crate::cluster::USER_NAMESPACES_HANDLER;
use crate::cluster::api_error::told;
use crate::cluster::exec::{Said, exec, exec_ok};
use crate::cluster::waiting::{State, until_logged};
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::{FOREIGN_NODE, World};
use crate::test_env::pods::{self, end};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim, holder};

pub(in crate::e2e) const NAME: &str = "user namespaces";

const SIZE: Size = Size::mebibytes(1);
/// Pods and their claims.
const HOST: &str = "host-users";
const OWN: &str = "own-users";
/// Of no volume: those of the store's volumes are far larger.
const OTHER_PROJECT: &str = "1";
/// All ids are mapped to themselves in the host's user namespace.
const IDENTITY: [&str; 3] = ["0", "0", "4294967295"];

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    if world.node.is_none() {
        story.skip("pods with a user namespace of their own", FOREIGN_NODE);
        return Ok(());
    }
    story.step("pods with and without a user namespace start with a volume", start(world)).await?;
    story.step("hostUsers: true: the pod changes the project id of its volume", changes(world)).await?;
    story
        .step("hostUsers: false: the pod is root of a namespace of its own, and writes", writes(world))
        .await?;
    story.step("hostUsers: false: the project id cannot be changed: EINVAL", cannot_change(world)).await?;
    story.step("hostUsers: false: a pod with volumeDevices is refused", refused(world)).await?;
    story
        .step("the driver reports the volume whose project id was changed, and no other", reported(world))
        .await?;
    story.step("pods and claims go", clear(world)).await
}

/// The pod as it is, with a user namespace of its own.
fn with_user_namespace(mut pod: Pod) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    spec.host_users = Some(false);
    spec.runtime_class_name = Some(USER_NAMESPACES_HANDLER.into());
    pod
}

async fn start(world: &World<'_>) -> Result<()> {
    let mut class = RuntimeClass { handler: USER_NAMESPACES_HANDLER.into(), ..RuntimeClass::default() };
    class.metadata.name = Some(USER_NAMESPACES_HANDLER.into());
    let classes: Api<RuntimeClass> = Api::all(world.client.clone());
    classes.create(&PostParams::default(), &class).await.map_err(told).context("create the RuntimeClass")?;
    for name in [HOST, OWN] {
        let claim = claim(name, &world.driver.class_name(), SIZE, "Filesystem", "ReadWriteOnce")?;
        claims::create(world, &claim).await?;
    }
    let host = holder(HOST, HOST, Use::Mounted, false)?;
    let own = with_user_namespace(holder(OWN, OWN, Use::Mounted, false)?);
    tokio::try_join!(pods::create(world, &host), pods::create(world, &own)).map(drop)
}

/// Has the pod put its volume into another project, as any owner of a directory may try.
async fn change_project(world: &World<'_>, pod: &str) -> Result<Said> {
    exec(&world.pods(), pod, &["/loopfs", "quota", "tag", "--id", OTHER_PROJECT, "/vol"]).await
}

async fn changes(world: &World<'_>) -> Result<()> {
    let said = change_project(world, HOST).await?;
    anyhow::ensure!(said.succeeded, "the project id could not be changed: {}{}", said.stdout, said.stderr);
    Ok(())
}

async fn writes(world: &World<'_>) -> Result<()> {
    let map = exec_ok(&world.pods(), OWN, &["/volume-check", "read", "/proc/self/uid_map"]).await?;
    let map: Vec<&str> = map.split_whitespace().collect();
    anyhow::ensure!(map.first() == Some(&"0") && map != IDENTITY, "the pod's ids are mapped as {map:?}");
    pods::write(world, OWN, Use::Mounted, "/vol/file", "by root of the pod").await?;
    pods::reads(world, OWN, "/vol/file", "by root of the pod").await
}

async fn cannot_change(world: &World<'_>) -> Result<()> {
    let said = change_project(world, OWN).await?;
    anyhow::ensure!(!said.succeeded, "the project id was changed: {}", said.stdout);
    anyhow::ensure!(
        said.stderr.contains("(EINVAL)"),
        "the project id could not be changed, but not because of the user namespace: {}",
        said.stderr
    );
    Ok(())
}

async fn refused(world: &World<'_>) -> Result<()> {
    let pod = with_user_namespace(holder("block-own-users", OWN, Use::Device, false)?);
    match world.pods().create(&PostParams::default(), &pod).await {
        Err(kube::Error::Api(status)) if status.code == 422 => {
            anyhow::ensure!(status.message.contains("volumeDevices: Forbidden"), "{}", status.message);
            Ok(())
        }
        Err(error) => Err(told(error)).context("create a pod with hostUsers: false and volumeDevices"),
        Ok(_) => anyhow::bail!("the API server accepts hostUsers: false together with volumeDevices"),
    }
}

/// The driver logs what its audit finds, once.
async fn reported(world: &World<'_>) -> Result<()> {
    let changed = claims::volume_of(world, HOST).await?.name_any();
    let unchanged = claims::volume_of(world, OWN).await?.name_any();
    let pods = world.live_driver_pods().await?;
    let pod = pods.first().context("the driver has no pod")?.name_any();
    until_logged(&world.driver_pods(), &pod, Some("csi"), world.patience.start, |line| {
        let abnormal = line.contains("ProjectChanged");
        if abnormal && line.contains(&unchanged) {
            return State::Hopeless(format!("the volume of {OWN} is reported: {line}"));
        }
        State::when(abnormal && line.contains(&changed), format!("nothing is logged of volume {changed}"))
    })
    .await
}

async fn clear(world: &World<'_>) -> Result<()> {
    tokio::try_join!(end(world, HOST), end(world, OWN))?;
    for claim in [HOST, OWN] {
        let volume = claims::volume_of(world, claim).await?.name_any();
        claims::delete(world, claim).await?;
        claims::gone(world, &volume).await?;
    }
    let classes: Api<RuntimeClass> = Api::all(world.client.clone());
    let deleted = classes.delete(USER_NAMESPACES_HANDLER, &DeleteParams::default()).await;
    deleted.map_err(told).context("delete the RuntimeClass").map(drop)
}
