//! The state of the cluster at the end of a run, for readers of the report: objects, events, logs of pods.

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::api::{ListParams, LogParams};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::test_env::environment::TestEnv;

/// Writes `objects/*.yaml` and `logs/pods/*.log` into `dir`. If something cannot be read, its file has the
/// error instead: a dump that fails must not hide why it was written.
pub(super) async fn write(env: &TestEnv<'_>, dir: &Path) {
    let objects = dir.join("objects");
    let logs = dir.join("logs").join("pods");
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
    dump::<Node>(env, &objects).await;
    dump::<Event>(env, &objects).await;
    let pods: Api<Pod> = Api::all(env.client.clone());
    for pod in pods.list(&ListParams::default()).await.into_iter().flatten() {
        pod_logs(env, &pod, &logs).await;
    }
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
