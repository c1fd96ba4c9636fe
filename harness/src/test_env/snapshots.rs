//! VolumeSnapshots of stories, and the VolumeSnapshotContents to which snapshot-controller binds them. Their kinds are
//! custom resources.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, TypedLocalObjectReference};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use testvm_cluster::api_error::api_error;
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until_one};

use super::claims;
use super::environment::TestEnv;
use super::sizes::Size;
use super::workload::VolumeMode;

const GROUP: &str = "snapshot.storage.k8s.io";
const SNAPSHOT: &str = "VolumeSnapshot";
const CONTENT: &str = "VolumeSnapshotContent";
const CLASS: &str = "VolumeSnapshotClass";

/// The label on a VolumeSnapshotContent with the node whose csi-snapshotter handles it.
pub(crate) const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";
/// The annotation of a VolumeSnapshotContent while csi-snapshotter waits for the driver's response.
pub(crate) const IN_CREATION: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-created";
/// The annotation of a VolumeSnapshotContent that csi-snapshotter may delete.
pub(crate) const IN_DELETION: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";

/// A snapshot of the driver for which no VolumeSnapshot was requested: an administrator creates its objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Existing<'a> {
    /// The name of both objects.
    pub(crate) name: &'a str,
    /// The name of the snapshot in the driver.
    pub(crate) handle: &'a str,
    pub(crate) mode: VolumeMode,
    /// The node that has the snapshot.
    pub(crate) node: &'a str,
}

/// Requests a snapshot of a claim. Without a class, it gets the default one of the driver.
pub(crate) async fn request(env: &TestEnv<'_>, name: &str, claim: &str, class: Option<&str>) -> Result<()> {
    let mut spec = json!({"source": {"persistentVolumeClaimName": claim}});
    if let Some(class) = class {
        spec["volumeSnapshotClassName"] = class.into();
    }
    let object = object(SNAPSHOT, name, json!({"spec": spec}));
    objects::create(&snapshots(env), &object).await.map(drop)
}

/// Creates the objects of an existing snapshot. The driver deletes the snapshot when the VolumeSnapshot is deleted.
pub(crate) async fn import(env: &TestEnv<'_>, existing: Existing<'_>) -> Result<()> {
    let Existing { name, handle, mode, node } = existing;
    let mut content = object(
        CONTENT,
        name,
        json!({"spec": {
            "driver": env.driver.name,
            "deletionPolicy": "Delete",
            "source": {"snapshotHandle": handle},
            "sourceVolumeMode": mode.as_str(),
            "volumeSnapshotRef": {"name": name, "namespace": env.namespace},
        }}),
    );
    // snapshot-controller labels only the contents that it creates itself.
    content.labels_mut().insert(MANAGED_BY.into(), node.into());
    objects::create(&contents(env), &content).await?;
    let snapshot = json!({"spec": {"source": {"volumeSnapshotContentName": name}}});
    objects::create(&snapshots(env), &object(SNAPSHOT, name, snapshot)).await.map(drop)
}

/// Waits until a VolumeSnapshot is ready to use, and returns its VolumeSnapshotContent.
pub(crate) async fn ready(env: &TestEnv<'_>, name: &str) -> Result<DynamicObject> {
    let snapshot = until_one(snapshots(env), name, env.timeouts.start, |snapshot| {
        let status = snapshot.map(|snapshot| snapshot.data["status"].clone()).unwrap_or_default();
        State::ready_if(status["readyToUse"] == true, format!("the status is {status}"))
    });
    let snapshot = snapshot.await.with_context(|| format!("VolumeSnapshot {name} is not ready to use"))?;
    let snapshot = snapshot.context("the VolumeSnapshot does not exist")?;
    let bound = text(&snapshot, "/status/boundVolumeSnapshotContentName")?;
    objects::read(&contents(env), bound).await
}

/// Waits until `condition` holds for an object. `problem` is the error message if it does not hold in time.
pub(crate) async fn until(
    api: Api<DynamicObject>,
    name: &str,
    within: Duration,
    problem: &str,
    condition: impl Fn(&DynamicObject) -> bool,
) -> Result<()> {
    until_one(api, name, within, |object| {
        let (metadata, data) = object.map(|object| (&object.metadata, &object.data)).unzip();
        State::ready_if(object.is_some_and(&condition), format!("it is {metadata:?} {data:?}"))
    })
    .await
    .with_context(|| format!("{name}: {problem}"))
    .map(drop)
}

/// Returns the VolumeSnapshotContent that snapshot-controller creates for a VolumeSnapshot, which may not exist yet.
pub(crate) async fn content_name(env: &TestEnv<'_>, snapshot: &str) -> Result<String> {
    let uid =
        objects::read(&snapshots(env), snapshot).await?.uid().context("the VolumeSnapshot has no UID")?;
    Ok(format!("snapcontent-{uid}"))
}

/// Returns a class of the driver whose snapshots stay when their VolumeSnapshot is deleted.
pub(crate) fn retaining_class(env: &TestEnv<'_>, name: &str) -> DynamicObject {
    object(CLASS, name, json!({"driver": env.driver.name, "deletionPolicy": "Retain"}))
}

/// Deletes the VolumeSnapshots of the namespace, and the VolumeSnapshotContents of the driver with their snapshots. A cluster
/// without these kinds has none.
pub(crate) async fn delete_all(env: &TestEnv<'_>) -> Result<()> {
    // Without the component, the API server does not know the kind, and gives no reason for its answer.
    let listed = match contents(env).list(&ListParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        listed => listed.map_err(api_error).context("list the VolumeSnapshotContents")?,
    };
    let nodes = objects::list(&Api::<Node>::all(env.client.clone()), "").await?;
    let nodes: BTreeSet<String> = nodes.iter().map(ResourceExt::name_any).collect();
    let deleted = snapshots(env).delete_collection(&DeleteParams::default(), &ListParams::default()).await;
    deleted.map_err(api_error).context("delete the VolumeSnapshots")?;
    for content in listed.iter().filter(|content| content.data["spec"]["driver"] == env.driver.name.as_str())
    {
        let name = content.name_any();
        patch_if_exists(env, &name, json!({"spec": {"deletionPolicy": "Delete"}})).await?;
        objects::delete_if_exists(&contents(env), &name).await?;
        // The csi-snapshotter of its node removes the finalizers, if there is such a node.
        if content.labels().get(MANAGED_BY).is_none_or(|node| !nodes.contains(node)) {
            patch_if_exists(env, &name, json!({"metadata": {"finalizers": null}})).await?;
        }
        objects::until_gone(contents(env), &name, env.timeouts.end).await?;
    }
    Ok(())
}

/// Changes a VolumeSnapshotContent, if it exists.
async fn patch_if_exists(env: &TestEnv<'_>, name: &str, change: Value) -> Result<()> {
    match contents(env).patch(name, &PatchParams::default(), &Patch::Merge(&change)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        patched => {
            patched.map_err(api_error).with_context(|| format!("patch {CONTENT} {name}: {change}")).map(drop)
        }
    }
}

/// Returns a claim of the driver's class with a VolumeSnapshot as its data source.
pub(crate) fn restored_claim(
    env: &TestEnv<'_>,
    name: &str,
    snapshot: &str,
    size: Size,
    mode: VolumeMode,
) -> Result<PersistentVolumeClaim> {
    let mut object = claims::claim_of_driver(env, name, size, mode)?;
    object.spec.get_or_insert_default().data_source = Some(TypedLocalObjectReference {
        api_group: Some(GROUP.into()),
        kind: SNAPSHOT.into(),
        name: snapshot.into(),
    });
    Ok(object)
}

/// Creates a claim like [`restored_claim`].
pub(crate) async fn restore(
    env: &TestEnv<'_>,
    name: &str,
    snapshot: &str,
    size: Size,
    mode: VolumeMode,
) -> Result<()> {
    claims::create(env, &restored_claim(env, name, snapshot, size, mode)?).await.map(drop)
}

/// Returns the text at a JSON pointer of an object.
pub(crate) fn text<'a>(object: &'a DynamicObject, pointer: &str) -> Result<&'a str> {
    let text = object.data.pointer(pointer).and_then(Value::as_str);
    text.with_context(|| format!("{} has no text at {pointer}: {}", object.name_any(), object.data))
}

pub(crate) fn snapshots(env: &TestEnv<'_>) -> Api<DynamicObject> {
    Api::namespaced_with(env.client.clone(), &env.namespace, &resource(SNAPSHOT))
}

pub(crate) fn contents(env: &TestEnv<'_>) -> Api<DynamicObject> {
    Api::all_with(env.client.clone(), &resource(CONTENT))
}

pub(crate) fn classes(env: &TestEnv<'_>) -> Api<DynamicObject> {
    Api::all_with(env.client.clone(), &resource(CLASS))
}

fn resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", kind))
}

fn object(kind: &str, name: &str, data: Value) -> DynamicObject {
    DynamicObject::new(name, &resource(kind)).data(data)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use testvm::go_build::required_version;
    use testvm_cluster::snapshotter::{CSI_SNAPSHOTTER, MODULE, SNAPSHOT_CONTROLLER};

    #[test]
    fn manifests_use_pinned_image_version() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
        let version = required_version(&read("vm-images/snapshotter/go.mod"), MODULE).unwrap();
        for (image, manifest) in [
            (SNAPSHOT_CONTROLLER, "csi/deploy/snapshot-controller/deployment.yaml"),
            (CSI_SNAPSHOTTER, "csi/deploy/snapshots/kustomization.yaml"),
        ] {
            assert!(image.ends_with(&format!(":{version}")), "{image} is not of {version}");
            assert!(
                read(manifest).contains(&format!("image: {image}\n")),
                "{manifest} does not name {image}"
            );
        }
    }
}
