//! Requests for objects whose errors name the request, the object and the message of the API server.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::api_error::api_error;
use super::waiting::{State, until_one};

/// Returns the name of a request in messages, such as `delete pods/data`.
fn named<K: Resource>(verb: &str, api: &Api<K>, name: &str) -> String {
    let plural = api.resource_url().rsplit('/').next().unwrap_or_default();
    format!("{verb} {plural}/{name}")
}

/// Creates an object.
///
/// # Errors
/// The API server refuses it.
pub async fn create<K>(api: &Api<K>, object: &K) -> Result<K>
where
    K: Resource + Serialize + DeserializeOwned + Clone + Debug,
{
    let created = api.create(&PostParams::default(), object).await.map_err(api_error);
    created.with_context(|| named("create", api, &object.name_any()))
}

/// Reads an object.
///
/// # Errors
/// The object does not exist, or the API server refuses the request.
pub async fn read<K>(api: &Api<K>, name: &str) -> Result<K>
where
    K: Resource + DeserializeOwned + Clone + Debug,
{
    api.get(name).await.map_err(api_error).with_context(|| named("read", api, name))
}

/// Returns the objects with these labels, or all if `labels` is empty.
///
/// # Errors
/// The API server refuses the request.
pub async fn list<K>(api: &Api<K>, labels: &str) -> Result<Vec<K>>
where
    K: Resource + DeserializeOwned + Clone + Debug,
{
    let listed = api.list(&ListParams::default().labels(labels)).await.map_err(api_error);
    Ok(listed.with_context(|| named("list", api, labels))?.items)
}

/// Changes an object by a merge patch.
///
/// # Errors
/// The object does not exist, or the API server refuses the change.
pub async fn patch<K>(api: &Api<K>, name: &str, change: &Value) -> Result<K>
where
    K: Resource + DeserializeOwned + Clone + Debug,
{
    let patched = api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.map_err(api_error);
    patched.with_context(|| named("patch", api, name))
}

/// Requests the deletion of an object.
///
/// # Errors
/// The object does not exist, or the API server refuses the request.
pub async fn delete<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource + DeserializeOwned + Clone + Debug,
{
    let deleted = api.delete(name, &DeleteParams::default()).await.map_err(api_error);
    deleted.with_context(|| named("delete", api, name)).map(drop)
}

/// Requests the deletion of an object, if it exists. The objects that it owns are deleted, too.
///
/// # Errors
/// The API server refuses the request.
pub async fn delete_if_exists<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource + DeserializeOwned + Clone + Debug,
{
    match api.delete(name, &DeleteParams::background()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        deleted => deleted.map_err(api_error).with_context(|| named("delete", api, name)).map(drop),
    }
}

/// Deletes an object, and waits until it does not exist.
///
/// # Errors
/// As [`delete`] and [`until_gone`].
pub async fn remove<K>(api: Api<K>, name: &str, within: Duration) -> Result<()>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    delete(&api, name).await?;
    until_gone(api, name, within).await
}

/// Waits until an object does not exist.
///
/// # Errors
/// The object still exists after `within`.
pub async fn until_gone<K>(api: Api<K>, name: &str, within: Duration) -> Result<()>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let waited = until_one(api.clone(), name, within, |object| {
        let left = object.map(Resource::meta);
        State::ready_if(object.is_none(), format!("it still exists: {left:?}"))
    });
    waited.await.with_context(|| named("wait for the deletion of", &api, name)).map(drop)
}
