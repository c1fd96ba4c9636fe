//! Lists objects in pages, so that the unwanted ones of a large cluster are never in memory together.

use std::fmt::Debug;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;

use crate::api::pruned::{Prune, Pruned};
use crate::api::queue::KubernetesObject;

/// Number of objects in each response.
const PAGE_SIZE: u32 = 500;

/// Returns the listed objects that `wanted` selects.
pub(crate) async fn selected<K: KubernetesObject + Prune>(
    api: &Api<Pruned<K>>,
    parameters: ListParams,
    wanted: impl Fn(&K) -> bool,
) -> kube::Result<Vec<K>> {
    let selected = of_items(api, parameters, |object: &Pruned<K>| wanted(object)).await?;
    Ok(selected.into_iter().map(Pruned::into_inner).collect())
}

/// Returns the listed objects of any type that `wanted` selects.
pub(crate) async fn of_items<T: Clone + Debug + DeserializeOwned>(
    api: &Api<T>,
    parameters: ListParams,
    wanted: impl Fn(&T) -> bool,
) -> kube::Result<Vec<T>> {
    let mut parameters = parameters.limit(PAGE_SIZE);
    let mut selected = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        selected.extend(page.items.into_iter().filter(&wanted));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(selected),
        }
    }
}

/// Returns what `part` takes from the metadata of the listed objects.
pub(crate) async fn of_metadata<K: KubernetesObject, T, C: Default + Extend<T>>(
    api: &Api<K>,
    parameters: ListParams,
    part: impl Fn(ObjectMeta) -> Option<T>,
) -> kube::Result<C> {
    let mut parameters = parameters.limit(PAGE_SIZE);
    let mut parts = C::default();
    loop {
        let page = api.list_metadata(&parameters).await?;
        parts.extend(page.items.into_iter().filter_map(|object| part(object.metadata)));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(parts),
        }
    }
}
