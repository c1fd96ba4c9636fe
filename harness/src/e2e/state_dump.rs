//! The state of the cluster at the end of a run, for readers of the report: objects, events, logs of pods.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Event, Node as NodeObject, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::api::{ListParams, LogParams};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use testvm::cache;
use testvm::session::Session;
use testvm_cluster::Node;

use crate::test_env::environment::{DOCTOR, TestEnv};
use crate::test_env::node_debug;

/// The directories of the dump.
const OBJECTS: &str = "objects";
const POD_LOGS: &str = "logs/pods";
const BUNDLES: &str = "bundles";
const FAILURES: &str = "failures";

/// Removes from `dir` what an earlier run has dumped there, so that it is not read as the state of this one.
///
/// # Errors
/// A directory cannot be removed.
pub(super) fn clear(dir: &Path) -> Result<()> {
    for dump in
        [dir.join(OBJECTS), dir.join(POD_LOGS), dir.join(BUNDLES), dir.join(FAILURES), dir.join(DOCTOR)]
    {
        cache::remove_dir(&dump)?;
    }
    Ok(())
}

/// Writes `objects/*.yaml` and `logs/pods/*.log` into `dir`. If something cannot be read, its file has the
/// error instead: a dump that fails must not hide why it was written.
pub(super) async fn write(env: &TestEnv<'_>, dir: &Path) {
    let objects = dir.join(OBJECTS);
    let logs = dir.join(POD_LOGS);
    for dir in [&objects, &logs] {
        if let Err(error) = fs::create_dir_all(dir) {
            eprintln!("create {}: {error}", dir.display());
            return;
        }
    }
    dump::<Pod>(env, &objects).await;
    dump::<PersistentVolumeClaim>(env, &objects).await;
    dump::<PersistentVolume>(env, &objects).await;
    dump::<StorageClass>(env, &objects).await;
    dump::<CSINode>(env, &objects).await;
    dump::<NodeObject>(env, &objects).await;
    dump::<Event>(env, &objects).await;
    let pods: Api<Pod> = Api::all(env.client.clone());
    for pod in pods.list(&ListParams::default()).await.into_iter().flatten() {
        pod_logs(env, &pod, &logs).await;
    }
}

/// Writes the state of the cluster and the archive of each node into the directory of a story that failed, before it is
/// cleaned up: `failures/STORY` in `dir`.
pub(super) async fn write_failure(session: &Session, env: &TestEnv<'_>, story: &str, dir: &Path) {
    let dir = dir.join(FAILURES).join(story);
    write(env, &dir).await;
    if let Some(cluster) = env.cluster {
        write_node(session, cluster.node(), &dir).await;
    }
}

/// Writes the archive of `dbg bundle` of a node into `dir`. If the node gives none, for example because its power is off, the
/// reason is printed. After Ctrl-C there is no time for an archive.
pub(super) async fn write_node(session: &Session, node: &Node, dir: &Path) {
    let bundle = async {
        try_write_bundle(node, dir).await;
        Ok(())
    };
    drop(session.until_cancelled(bundle).await);
}

/// Writes the archive of `dbg bundle` of a node into `dir`, or prints why there is none.
pub(super) async fn try_write_bundle(node: &Node, dir: &Path) {
    if let Err(error) = write_bundle(node, dir).await {
        eprintln!("store the archive of dbg bundle of {}: {error:#}", node.name());
    }
}

/// Writes the archive of `dbg bundle` of a node into `dir`, and returns its path.
pub(super) async fn write_bundle(node: &Node, dir: &Path) -> Result<PathBuf> {
    let bundles = dir.join(BUNDLES);
    fs::create_dir_all(&bundles).with_context(|| format!("create {}", bundles.display()))?;
    let path = bundles.join(format!("{}.tar", node.name()));
    node_debug::store_bundle(node, &path).await?;
    Ok(path)
}

async fn dump<K>(env: &TestEnv<'_>, dir: &Path)
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
{
    let api: Api<K> = Api::all(env.client.clone());
    let text = match api.list(&ListParams::default()).await {
        Ok(list) => {
            let mut items = list.items;
            for item in &mut items {
                // managedFields are longer than the rest of the object and not needed here.
                item.meta_mut().managed_fields = None;
            }
            serde_norway::to_string(&items).unwrap_or_else(|error| format!("# {error}\n"))
        }
        Err(error) => format!("# {error}\n"),
    };
    keep(&dir.join(format!("{}.yaml", K::plural(&()))), &text);
}

async fn pod_logs(env: &TestEnv<'_>, pod: &Pod, dir: &Path) {
    let (Some(namespace), name) = (pod.namespace(), pod.name_any()) else { return };
    let pods: Api<Pod> = Api::namespaced(env.client.clone(), &namespace);
    for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
        for (previous, suffix) in [(true, ".previous"), (false, "")] {
            let params =
                LogParams { container: Some(container.name.clone()), previous, ..LogParams::default() };
            // A container that was not restarted has no previous log.
            let Ok(text) = pods.logs(&name, &params).await else { continue };
            keep(&dir.join(format!("{namespace}.{name}.{}{suffix}.log", container.name)), &text);
        }
    }
}

fn keep(path: &Path, text: &str) {
    if let Err(error) = fs::write(path, text) {
        eprintln!("write {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other files in the directory are kept.
    #[test]
    fn only_an_earlier_dump_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let old = [
            "bundles/node-0.tar",
            "objects/pods.yaml",
            "logs/pods/a.b.c.log",
            "failures/flow/objects/pods.yaml",
        ]
        .map(write);
        let other = write("logs/node-0/console.log");
        clear(dir.path()).unwrap();
        assert!(old.iter().all(|path| !path.exists()) && other.exists());
        clear(dir.path()).unwrap();
    }
}
