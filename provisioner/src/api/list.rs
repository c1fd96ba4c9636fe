//! Lists objects in pages, so that the unwanted ones of a large cluster are never in memory together.

use kube::{Api, api::ListParams};

use crate::api::{
    pruned::{Prune, Pruned},
    queue::Object,
};

/// Number of objects in each response.
const PAGE_SIZE: u32 = 500;

/// Returns the listed objects that `wanted` selects.
///
/// # Errors
/// When the request of a page fails.
pub(crate) async fn selected<K: Object + Prune>(
    api: &Api<Pruned<K>>,
    parameters: ListParams,
    wanted: impl Fn(&K) -> bool,
) -> kube::Result<Vec<K>> {
    let mut parameters = parameters.limit(PAGE_SIZE);
    let mut selected = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        selected.extend(page.items.into_iter().map(Pruned::into_inner).filter(&wanted));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(selected),
        }
    }
}
