//! Proof that the API server holds no object of a given name.
//!
//! Volumes and objects are deleted because another object does not exist. The HTTP status 404 does not prove that: a proxy
//! or load balancer between this process and the API server returns it as well, and so does an API server that does not
//! serve the resource. The API server's own status of the reason `NotFound` proves it, if its details name the object.
//!
//! `docs/decisions/0024-proof-of-absence.md` gives the reasons.

use kube::core::{PartialObjectMeta, Status};
use kube::{Api, Resource};

use crate::api::queue::KubernetesObject;

/// Returns `true` if an object can have this name. Tenants write names into claims, and the name is part of the path of a request: `?`
/// would list all objects.
fn is_object_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    !matches!(name, "" | "." | "..") && name.bytes().all(is_allowed)
}

/// Reads an object. Returns `None` only if the API server proves that it does not exist, or if no object can have this name.
///
/// # Errors
/// When the request fails, and for a status 404 that proves nothing.
pub(crate) async fn get_opt<K: KubernetesObject>(api: &Api<K>, name: &str) -> kube::Result<Option<K>> {
    if !is_object_name(name) {
        return Ok(None);
    }
    unless_absent::<K, _>(api.get(name).await, &(), name)
}

/// Reads the metadata of an object; see [`get_opt`].
pub(crate) async fn get_metadata_opt<K: KubernetesObject>(
    api: &Api<K>,
    name: &str,
) -> kube::Result<Option<PartialObjectMeta<K>>> {
    if !is_object_name(name) {
        return Ok(None);
    }
    unless_absent::<K, _>(api.get_metadata(name).await, &(), name)
}

/// Turns the error that proves the absence of the object `name` into `None`.
pub(crate) fn unless_absent<K: Resource, T>(
    response: kube::Result<T>,
    kind: &K::DynamicType,
    name: &str,
) -> kube::Result<Option<T>> {
    match response {
        Err(kube::Error::Api(status)) if is_proof::<K>(&status, kind, name) => Ok(None),
        response => response.map(Some),
    }
}

/// Returns `true` if the status can only come from an API server that serves the resource and has no object `name`.
fn is_proof<K: Resource>(status: &Status, kind: &K::DynamicType, name: &str) -> bool {
    status.reason == "NotFound"
        && status.details.as_ref().is_some_and(|details| {
            details.name == name && details.kind == K::plural(kind) && details.group == K::group(kind)
        })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolume;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn not_found(change: Value) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound",
            "details": {"name": "pvc-1", "kind": "persistentvolumes"},
        });
        crate::testing::fixtures::merge(&mut status, change);
        status
    }

    #[rstest]
    #[case::of_a_volume("pvc-0b6b9a6d-6d0e", true)]
    #[case::of_a_node("node-1.example.org", true)]
    #[case::of_a_role("system:node", true)]
    #[case::empty("", false)]
    #[case::a_query("?", false)]
    #[case::an_option("pvc-1?watch=true", false)]
    #[case::another_path("a/b", false)]
    #[case::the_parent("..", false)]
    #[case::encoded("%2e", false)]
    fn requests_name_one_object(#[case] name: &str, #[case] expected: bool) {
        assert_eq!(is_object_name(name), expected);
    }

    #[rstest]
    #[case::the_api_server_says_so(not_found(json!({})), true)]
    #[case::without_details(not_found(json!({"details": null})), false)]
    #[case::of_another_object(not_found(json!({"details": {"name": "pvc-2"}})), false)]
    #[case::of_another_kind(not_found(json!({"details": {"kind": "persistentvolumeclaims"}})), false)]
    #[case::of_another_group(not_found(json!({"details": {"group": "storage.k8s.io"}})), false)]
    #[case::without_reason(not_found(json!({"reason": null})), false)]
    #[case::of_another_reason(not_found(json!({"reason": "Forbidden"})), false)]
    #[case::text_of_a_proxy(json!({"code": 404, "reason": "Failed to parse error data", "message": "no such page"}), false)]
    fn only_the_api_server_proves_absence(#[case] status: Value, #[case] proof: bool) {
        let status: Status = serde_json::from_value(status).unwrap();
        assert_eq!(is_proof::<PersistentVolume>(&status, &(), "pvc-1"), proof);
    }
}
