//! Claims and pods with volumes, as a user would write them.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::objects;
use super::waiting::{State, until_one};

const SERVICE_ACCOUNT_DEADLINE: Duration = Duration::from_secs(300);

/// The `volumeMode` of a claim. A pod mounts a file system, but has a block device under `volumeDevices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeMode {
    Filesystem,
    Block,
}

impl VolumeMode {
    /// Returns the name in Kubernetes objects.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            VolumeMode::Filesystem => "Filesystem",
            VolumeMode::Block => "Block",
        }
    }
}

impl fmt::Display for VolumeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A claim in a pod.
#[derive(Clone, Debug)]
pub struct Held<'a> {
    /// The name of the claim.
    pub claim: &'a str,
    /// The path of the claim in the container.
    pub path: &'a str,
    /// The mode of the claim.
    pub mode: VolumeMode,
    /// `true` if the claim is read-only in the pod.
    pub read_only: bool,
}

/// The only container of a pod. It must end on SIGTERM, or the pod takes five seconds to end.
#[derive(Clone, Copy, Debug)]
pub struct PodProgram<'a> {
    /// The name of the container.
    pub container: &'a str,
    /// Its image, which the node must have.
    pub image: &'a str,
    /// The command line.
    pub command: &'a [&'a str],
}

/// Returns a pod that runs a program with these claims.
///
/// # Errors
/// An argument is not what the type of the object requires.
pub fn pod(name: &str, program: PodProgram<'_>, held: &[Held<'_>]) -> Result<Pod> {
    let used = |mode: VolumeMode, path: &str| -> Vec<Value> {
        let used = held.iter().filter(|held| held.mode == mode);
        used.map(|held| json!({"name": held.claim, (path): held.path})).collect()
    };
    let volumes = held.iter().map(|held| {
        let source = json!({"claimName": held.claim, "readOnly": held.read_only});
        json!({"name": held.claim, "persistentVolumeClaim": source})
    });
    typed(json!({
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": program.container,
                "image": program.image,
                "imagePullPolicy": "Never",
                "command": program.command,
                "volumeMounts": used(VolumeMode::Filesystem, "mountPath"),
                "volumeDevices": used(VolumeMode::Block, "devicePath"),
            }],
            "volumes": volumes.collect::<Vec<_>>(),
        },
    }))
}

/// Returns the node of a pod, or `None` before the scheduler has selected one.
#[must_use]
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Returns a claim of a StorageClass. `size` is a Kubernetes quantity, and `access` an access mode.
///
/// # Errors
/// An argument is not what the type of the object requires.
pub fn claim(
    name: &str,
    class: &str,
    size: &str,
    mode: VolumeMode,
    access: &str,
) -> Result<PersistentVolumeClaim> {
    typed(json!({"metadata": {"name": name}, "spec": claim_spec(class, size, mode, access)}))
}

/// Returns the `spec` of a claim, for templates of claims.
#[must_use]
pub fn claim_spec(class: &str, size: &str, mode: VolumeMode, access: &str) -> Value {
    json!({
        "storageClassName": class,
        "volumeMode": mode.as_str(),
        "accessModes": [access],
        "resources": {"requests": {"storage": size}},
    })
}

/// Creates a namespace, and waits until pods can be created in it: each needs the ServiceAccount that Kubernetes creates.
///
/// # Errors
/// The API server refuses it, or the ServiceAccount does not come.
pub async fn create_namespace(client: &Client, name: &str) -> Result<()> {
    let namespace: Namespace = typed(json!({"metadata": {"name": name}}))?;
    objects::create(&Api::all(client.clone()), &namespace).await?;
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), name);
    let created = until_one(accounts, "default", SERVICE_ACCOUNT_DEADLINE, |account| {
        State::ready_if(account.is_some(), "Kubernetes has not created it")
    });
    created.await.map(drop)
}

/// Returns the name of the PersistentVolume of a bound claim.
///
/// # Errors
/// The claim cannot be read, or names no volume.
pub async fn volume_of(claims: &Api<PersistentVolumeClaim>, claim: &str) -> Result<String> {
    let bound = objects::read(claims, claim).await?;
    let name = bound.spec.and_then(|spec| spec.volume_name);
    name.with_context(|| format!("claim {claim} names no volume"))
}

/// Deletes a bound claim of a class with the reclaim policy Delete, and waits until its PersistentVolume is deleted.
///
/// # Errors
/// The API server refuses it, or the volume is not deleted in time.
pub async fn delete_claim(
    client: &Client,
    claims: &Api<PersistentVolumeClaim>,
    claim: &str,
    within: Duration,
) -> Result<()> {
    let volume = volume_of(claims, claim).await?;
    objects::delete(claims, claim).await?;
    objects::until_gone(Api::<PersistentVolume>::all(client.clone()), &volume, within).await
}

/// Waits until a pod runs.
///
/// # Errors
/// The pod does not run in time.
pub async fn until_pod_runs(pods: &Api<Pod>, pod: &str, within: Duration) -> Result<()> {
    until_one(pods.clone(), pod, within, |pod| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("not there");
        State::ready_if(phase == "Running", format!("it is {phase}"))
    })
    .await
    .with_context(|| format!("pod {pod} does not run"))
    .map(drop)
}

/// Waits until a Deployment has an available pod.
///
/// # Errors
/// No pod is available in time.
pub async fn until_available(
    client: &Client,
    namespace: &str,
    deployment: &str,
    within: Duration,
) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    until_one(deployments, deployment, within, |deployment| {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        let available = status.and_then(|status| status.available_replicas).unwrap_or_default();
        State::ready_if(available > 0, format!("its status is {status:?}"))
    })
    .await
    .with_context(|| format!("no pod of deployment {namespace}/{deployment} is available"))
    .map(drop)
}

/// Returns an object that a test has as JSON.
///
/// # Errors
/// It is not what its type says.
pub fn typed<K: serde::de::DeserializeOwned>(value: Value) -> Result<K> {
    serde_json::from_value(value).context("an object of the test is not what its type says")
}
