//! Parses a ConfigMap of manifests, completely or not at all: if part of a declaration were ignored, its objects would count as
//! not declared any more and would be deleted.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DynamicObject, TypeMeta};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::kinds::{KINDS, ManagedKind, ObjectKey, RBAC};
use crate::objects::identity::{Identity, MANAGER};

/// The recommended label for the manager of an object.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The recommended label for the instance: the driver, because several drivers may run in one cluster.
const INSTANCE: &str = "app.kubernetes.io/instance";

/// The objects that a ConfigMap declares.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Declaration {
    /// The resource version of the ConfigMap.
    pub(crate) version: Option<String>,
    pub(crate) objects: BTreeMap<ObjectKey, DynamicObject>,
}

/// Returns the labels of the objects that the controller of a driver manages.
pub(crate) fn labels(identity: &Identity) -> BTreeMap<String, String> {
    BTreeMap::from([
        (MANAGED_BY.to_owned(), MANAGER.to_owned()),
        (INSTANCE.to_owned(), identity.driver().to_owned()),
    ])
}

/// Returns the label selector of these objects.
pub(crate) fn selector(identity: &Identity) -> String {
    labels(identity).iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// Returns `true` if the controller of this driver manages the object.
pub(crate) fn is_ours(object: &DynamicObject, identity: &Identity) -> bool {
    let found = object.metadata.labels.as_ref();
    labels(identity).iter().all(|(key, value)| found.and_then(|found| found.get(key)) == Some(value))
}

/// A manifest. Other metadata is not allowed.
#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "apiVersion", default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    metadata: Metadata,
    #[serde(flatten)]
    data: Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

/// Parses a declaration.
///
/// # Errors
/// A text that says where the first error is.
pub(crate) fn parse(
    config_map: &ConfigMap,
    namespace: &str,
    identity: &Identity,
) -> Result<Declaration, String> {
    if let Some((file, _)) = config_map.binary_data.iter().flatten().next() {
        return Err(format!(
            "{file} is in binaryData, because it is not UTF-8, so its objects cannot be read; save it as UTF-8 and apply it again"
        ));
    }
    let mut objects = BTreeMap::new();
    for (file, text) in config_map.data.iter().flatten() {
        let in_file = |message: String| format!("{file}: {message}");
        for manifest in manifests(text).map_err(|error| in_file(error.to_string()))? {
            let (key, object) = declared(manifest, namespace, identity).map_err(in_file)?;
            if objects.contains_key(&key) {
                return Err(in_file(format!("{} {} is declared twice", key.kind, key.name)));
            }
            objects.insert(key, object);
        }
    }
    // A mistake empties a ConfigMap more often than an administrator does who wants all objects to be removed.
    if objects.is_empty() {
        let empty = "it declares no object; declare the objects to keep, or delete the ConfigMap, so that the controller keeps none";
        return Err(empty.to_owned());
    }
    Ok(Declaration { version: config_map.metadata.resource_version.clone(), objects })
}

fn manifests(text: &str) -> anyhow::Result<Vec<Manifest>> {
    let mut found = Vec::new();
    for document in serde_norway::Deserializer::from_str(text) {
        let value = Value::deserialize(document)?;
        // A file may begin or end with a separator.
        if !value.is_null() {
            found.push(serde_json::from_value(value)?);
        }
    }
    Ok(found)
}

fn declared(
    manifest: Manifest,
    namespace: &str,
    identity: &Identity,
) -> Result<(ObjectKey, DynamicObject), String> {
    let Manifest { api_version, kind, metadata, mut data } = manifest;
    let Some(known) = ManagedKind::of(&api_version, &kind) else {
        let supported: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
        let supported = supported.join(", ");
        return Err(format!("{kind:?} of {api_version:?} is not a supported kind; supported: {supported}"));
    };
    let Some(name) = metadata.name.filter(|name| !name.is_empty()) else {
        return Err(format!("a {kind} has no name"));
    };
    let given = metadata.namespace.unwrap_or_default();
    if given != if known.namespaced { namespace } else { "" } {
        return Err(format!(
            "{kind} {name} has namespace {given:?}; only objects in namespace {namespace:?} can be declared"
        ));
    }
    if data.get("aggregationRule").is_some_and(|rule| !rule.is_null()) {
        return Err(format!(
            "{kind} {name} has an aggregationRule, but then another controller writes its rules"
        ));
    }
    complete(&mut data);
    let mut labelled = metadata.labels.unwrap_or_default();
    labelled.extend(labels(identity));
    let object = DynamicObject {
        types: Some(TypeMeta { api_version, kind }),
        metadata: ObjectMeta {
            name: Some(name),
            namespace: known.namespaced.then_some(given),
            labels: Some(labelled),
            annotations: metadata.annotations,
            ..ObjectMeta::default()
        },
        data: Value::Object(data),
    };
    Ok((ObjectKey::of(known, &object), object))
}

/// Adds the defaults that the API server sets in bindings: the API group of roles, users and groups.
fn complete(data: &mut Map<String, Value>) {
    let is_account = |subject: &Value| {
        subject.get("kind").and_then(Value::as_str).is_none_or(|kind| kind == "ServiceAccount")
    };
    // An empty group counts as none, and the API server stores none for accounts.
    let set = |reference: &mut Value, default: Option<&str>| {
        let Value::Object(reference) = reference else { return };
        if reference.get("apiGroup").is_some_and(|group| *group == json!("") || group.is_null()) {
            reference.remove("apiGroup");
        }
        if let Some(default) = default {
            reference.entry("apiGroup").or_insert_with(|| json!(default));
        }
    };
    let subjects = data.get_mut("subjects").and_then(Value::as_array_mut);
    for subject in subjects.into_iter().flatten() {
        let default = (!is_account(subject)).then_some(RBAC);
        set(subject, default);
    }
    data.get_mut("roleRef").into_iter().for_each(|role| set(role, Some(RBAC)));
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use rstest::rstest;

    use super::*;
    use crate::testing::fixtures;

    fn parsed(files: &[(&str, &str)]) -> Result<Declaration, String> {
        let data = files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect();
        let config_map = ConfigMap { data: Some(data), ..ConfigMap::default() };
        parse(&config_map, "loopfs-system", &fixtures::identity())
    }

    #[test]
    fn deployed_manifests_are_a_valid_declaration() {
        let declaration = parsed(&[
            ("csidriver.yaml", include_str!("../../../../csi/deploy/csidriver.yaml")),
            ("rbac.yaml", include_str!("../../../../csi/deploy/rbac.yaml")),
            ("storageclass.yaml", include_str!("../../../../csi/deploy/storageclass.yaml")),
        ]);
        let declaration = declaration.unwrap();
        let names: Vec<_> = declaration.objects.keys().map(ObjectKey::to_string).collect();
        assert_eq!(
            names,
            [
                "CSIDriver csi.loopfs.dev",
                "ClusterRole loopfs-provisioner",
                "ClusterRoleBinding loopfs-provisioner",
                "Role loopfs-system/loopfs-provisioner",
                "RoleBinding loopfs-system/loopfs-provisioner",
                "StorageClass loopfs",
            ]
        );
        assert!(declaration.objects.values().all(|object| is_ours(object, &fixtures::identity())));
    }

    #[test]
    fn subjects_get_the_default_api_group() {
        let binding = "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: b}, \
                       roleRef: {kind: ClusterRole, name: r, apiGroup: ''}, \
                       subjects: [{kind: User, name: u}, {kind: ServiceAccount, name: s, namespace: n, apiGroup: ''}]}";
        let declaration = parsed(&[("b.yaml", binding)]).unwrap();
        let data = &declaration.objects.values().next().unwrap().data;
        assert_eq!(data["roleRef"]["apiGroup"], "rbac.authorization.k8s.io");
        assert_eq!(data["subjects"][0]["apiGroup"], "rbac.authorization.k8s.io");
        assert_eq!(data["subjects"][1].get("apiGroup"), None);
    }

    #[rstest]
    #[case::nothing("", "declares no object")]
    #[case::separators_only("---\n---\n", "declares no object")]
    #[case::no_yaml("{", "a.yaml: ")]
    #[case::no_object("[]", "a.yaml: invalid type")]
    #[case::other_kind(
        "{apiVersion: v1, kind: Secret, metadata: {name: s}}",
        "\"Secret\" of \"v1\" is not a supported kind; supported: CSIDriver, "
    )]
    #[case::other_version(
        "{apiVersion: storage.k8s.io/v1beta1, kind: CSIDriver, metadata: {name: s}}",
        "is not a supported kind"
    )]
    #[case::no_kind("{metadata: {name: s}}", "\"\" of \"\" is not a supported kind")]
    #[case::no_name("{apiVersion: storage.k8s.io/v1, kind: CSIDriver}", "a CSIDriver has no name")]
    #[case::owned(
        "{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: s, ownerReferences: []}}",
        "unknown field `ownerReferences`"
    )]
    #[case::elsewhere(
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: r, namespace: kube-system}}",
        "Role r has namespace \"kube-system\"; only objects in namespace \"loopfs-system\""
    )]
    #[case::nowhere(
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: r}}",
        "has namespace \"\""
    )]
    #[case::aggregated(
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: r}, aggregationRule: {}}",
        "has an aggregationRule"
    )]
    #[case::twice(
        "{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: s}}\n---\n{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: s}}",
        "CSIDriver s is declared twice"
    )]
    fn invalid_declarations_are_rejected(#[case] text: &str, #[case] expected: &str) {
        let error = parsed(&[("a.yaml", text)]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn binary_file_is_rejected() {
        let class = include_str!("../../../../csi/deploy/storageclass.yaml");
        let data = BTreeMap::from([("class.yaml".to_owned(), class.to_owned())]);
        let binary = BTreeMap::from([("driver.yaml".to_owned(), ByteString(vec![0xff]))]);
        let config_map = ConfigMap { data: Some(data), binary_data: Some(binary), ..ConfigMap::default() };
        let error = parse(&config_map, "loopfs-system", &fixtures::identity()).unwrap_err();
        assert!(error.starts_with("driver.yaml is in binaryData"), "{error}");
    }
}
