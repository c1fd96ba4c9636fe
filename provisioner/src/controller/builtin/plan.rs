//! Compares the declared state of an object with its observed state and plans the action. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DynamicObject, Preconditions};
use serde_json::{Map, Value};

use super::declaration::{self, Declaration};
use super::kinds::{ManagedKind, ObjectKey};
use crate::objects::identity::Identity;

/// The action to take for an object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ObjectAction {
    Create(Box<DynamicObject>),
    /// Update the existing object, unless it changes in the meantime.
    Update {
        object: Box<DynamicObject>,
        fields: Vec<String>,
    },
    /// These fields are immutable: delete the existing object, unless it changes in the meantime, and create it again.
    Replace {
        found: Preconditions,
        object: Box<DynamicObject>,
        fields: Vec<String>,
    },
    /// Report that these fields are immutable, and that objects of this kind are not deleted.
    Immutable {
        fields: Vec<String>,
    },
    /// Delete the object, which is not declared any more.
    Remove(Preconditions),
    /// Report that the object is declared but exists without the labels of this driver.
    Refuse,
}

/// Plans the action for one object. Returns `None` if it is in its declared state.
pub(crate) fn action(
    kind: &ManagedKind,
    declared: Option<&DynamicObject>,
    found: Option<&DynamicObject>,
    identity: &Identity,
) -> Option<ObjectAction> {
    match (declared, found) {
        (None, None) => None,
        (Some(declared), None) => Some(ObjectAction::Create(Box::new(declared.clone()))),
        // It is being deleted; the watch reports the end of that.
        (_, Some(found)) if found.metadata.deletion_timestamp.is_some() => None,
        (None, Some(_)) if kind.kept => None,
        (None, Some(found)) => {
            declaration::is_ours(found, identity).then(|| ObjectAction::Remove(preconditions(found)))
        }
        (Some(_), Some(found)) if !declaration::is_ours(found, identity) => Some(ObjectAction::Refuse),
        (Some(declared), Some(found)) => repair(kind, declared, found),
    }
}

fn repair(kind: &ManagedKind, declared: &DynamicObject, found: &DynamicObject) -> Option<ObjectAction> {
    let mut object = found.clone();
    let mut differing = Vec::new();
    let mut immutable = Vec::new();
    for name in names(kind, declared) {
        let default = &kind.defaults[name];
        let wanted = fields(kind, &declared.data).and_then(|fields| fields.get(name));
        let present = fields(kind, &found.data).and_then(|fields| fields.get(name));
        if effective(wanted, default) == effective(present, default) {
            continue;
        }
        differing.push(name.to_owned());
        let fields = fields_mut(kind, &mut object.data);
        if kind.immutable.contains(&name) || fields.is_none() {
            immutable.push(name.to_owned());
        }
        // Otherwise, the existing object does not have the form of its kind.
        let Some(fields) = fields else { continue };
        match wanted {
            Some(wanted) => drop(fields.insert(name.to_owned(), wanted.clone())),
            None => drop(fields.remove(name)),
        }
    }
    // Labels and annotations that other writers have added stay.
    for (what, wanted, present) in [
        ("labels", &declared.metadata.labels, &mut object.metadata.labels),
        ("annotations", &declared.metadata.annotations, &mut object.metadata.annotations),
    ] {
        let present = present.get_or_insert_default();
        let missing = |(key, value): &(&String, &String)| present.get(*key) != Some(value);
        let missing: Vec<_> = wanted.iter().flatten().filter(missing).collect();
        if !missing.is_empty() {
            differing.push(what.to_owned());
        }
        for (key, value) in missing {
            present.insert(key.clone(), value.clone());
        }
    }
    if differing.is_empty() {
        None
    } else if !immutable.is_empty() && kind.kept {
        Some(ObjectAction::Immutable { fields: immutable })
    } else if !immutable.is_empty() {
        // Labels, annotations and fields that the declaration does not mention stay here, too.
        let ObjectMeta { name, namespace, labels, annotations, .. } = object.metadata;
        object.metadata = ObjectMeta { name, namespace, labels, annotations, ..ObjectMeta::default() };
        object.types = declared.types.clone();
        Some(ObjectAction::Replace {
            found: preconditions(found),
            object: Box::new(object),
            fields: differing,
        })
    } else {
        Some(ObjectAction::Update { object: Box::new(object), fields: differing })
    }
}

/// Returns the fields to compare: the known ones, and declared ones that a later Kubernetes may have added.
fn names<'a>(kind: &'a ManagedKind, declared: &'a DynamicObject) -> BTreeSet<&'a str> {
    let known = kind.defaults.as_object();
    let fields = known.into_iter().chain(fields(kind, &declared.data));
    fields.flat_map(Map::keys).map(String::as_str).collect()
}

fn fields<'a>(kind: &ManagedKind, data: &'a Value) -> Option<&'a Map<String, Value>> {
    match kind.within {
        Some(within) => data.get(within)?.as_object(),
        None => data.as_object(),
    }
}

fn fields_mut<'a>(kind: &ManagedKind, data: &'a mut Value) -> Option<&'a mut Map<String, Value>> {
    match kind.within {
        Some(within) => {
            let fields = data.as_object_mut()?.entry(within).or_insert_with(|| Value::Object(Map::new()));
            fields.as_object_mut()
        }
        None => data.as_object_mut(),
    }
}

/// Returns the effective value of a field: its default if it is absent or empty.
fn effective<'a>(value: Option<&'a Value>, default: &'a Value) -> &'a Value {
    let is_empty = |value: &&Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    value.filter(|value| !is_empty(value)).unwrap_or(default)
}

fn preconditions(found: &DynamicObject) -> Preconditions {
    Preconditions {
        uid: found.metadata.uid.clone(),
        resource_version: found.metadata.resource_version.clone(),
    }
}

/// Returns the declared fields that have other values in an object that the API server stored.
pub(crate) fn differences(
    kind: &ManagedKind,
    declared: &DynamicObject,
    stored: &DynamicObject,
    identity: &Identity,
) -> Vec<String> {
    match action(kind, Some(declared), Some(stored), identity) {
        Some(
            ObjectAction::Update { fields, .. }
            | ObjectAction::Replace { fields, .. }
            | ObjectAction::Immutable { fields },
        ) => fields,
        Some(ObjectAction::Refuse) => vec!["labels".to_owned()],
        Some(ObjectAction::Create(_) | ObjectAction::Remove(_)) | None => vec![],
    }
}

/// Plans the actions for all declared objects, and for existing ones that are not declared any more.
pub(crate) fn steps(
    declaration: &Declaration,
    found: &BTreeMap<ObjectKey, DynamicObject>,
    identity: &Identity,
) -> Vec<(ObjectKey, ObjectAction)> {
    let undeclared = found.keys().filter(|key| !declaration.objects.contains_key(key));
    let keys = declaration.objects.keys().chain(undeclared);
    let decide = |key: &ObjectKey| {
        let action =
            action(ManagedKind::named(key.kind)?, declaration.objects.get(key), found.get(key), identity)?;
        Some((key.clone(), action))
    };
    keys.filter_map(decide).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::testing::fixtures;

    /// Returns an object as the API server returns it for a manifest.
    fn object(manifest: Value, change: Value) -> DynamicObject {
        let labels = json!(declaration::labels(&fixtures::identity()));
        let mut whole =
            json!({"metadata": {"name": "x", "uid": "u", "resourceVersion": "7", "labels": labels}});
        fixtures::merge(&mut whole, manifest);
        fixtures::merge(&mut whole, change);
        serde_json::from_value(whole).unwrap()
    }

    fn declared(kind: &str) -> Value {
        match kind {
            "CSIDriver" => {
                json!({"spec": {"attachRequired": false, "fsGroupPolicy": "File", "storageCapacity": true}})
            }
            "StorageClass" => {
                json!({"provisioner": "p", "mountOptions": ["nodev"], "parameters": {"a": "b"}, "volumeBindingMode": "WaitForFirstConsumer"})
            }
            "PriorityClass" => json!({"value": 1000, "description": "d"}),
            "ClusterRole" | "Role" => {
                json!({"rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]})
            }
            _ => {
                json!({"roleRef": {"kind": "ClusterRole", "name": "r"}, "subjects": [{"kind": "User", "name": "u"}]})
            }
        }
    }

    /// Returns the planned action and the fields that differ.
    fn decided(kind: &str, found: Value) -> String {
        let kind = ManagedKind::named(kind).unwrap();
        let wanted = object(declared(kind.name), json!({"metadata": {"uid": null, "resourceVersion": null}}));
        let found = object(declared(kind.name), found);
        match action(kind, Some(&wanted), Some(&found), &fixtures::identity()) {
            None => "nothing".to_owned(),
            Some(ObjectAction::Create(_)) => "create".to_owned(),
            Some(ObjectAction::Update { object, fields }) => {
                // The update replaces the object of this version, and the object then needs no further action.
                assert_eq!(object.metadata.resource_version.as_deref(), Some("7"));
                assert_eq!(action(kind, Some(&wanted), Some(&object), &fixtures::identity()), None);
                format!("update {}", fields.join(","))
            }
            Some(ObjectAction::Replace { found, object, fields }) => {
                assert_eq!((found.uid.as_deref(), found.resource_version.as_deref()), (Some("u"), Some("7")));
                assert_eq!((&object.metadata.uid, &object.metadata.resource_version), (&None, &None));
                let (kept, declared) = (&object.metadata, &wanted.metadata);
                assert_eq!((&kept.name, &kept.namespace), (&declared.name, &declared.namespace));
                assert_eq!(action(kind, Some(&wanted), Some(&object), &fixtures::identity()), None);
                format!("replace {}", fields.join(","))
            }
            Some(ObjectAction::Immutable { fields }) => format!("report {}", fields.join(",")),
            Some(ObjectAction::Remove(_)) => "remove".to_owned(),
            Some(ObjectAction::Refuse) => "refuse".to_owned(),
        }
    }

    #[rstest]
    #[case::same("CSIDriver", json!({}), "nothing")]
    #[case::defaults("CSIDriver", json!({"spec": {"podInfoOnMount": false, "requiresRepublish": false, "seLinuxMount": false, "volumeLifecycleModes": ["Persistent"]}}), "nothing")]
    #[case::unknown_default("CSIDriver", json!({"spec": {"fieldOfTheFuture": true}}), "nothing")]
    #[case::annotated_by_others("StorageClass", json!({"metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}, "labels": {"team": "x"}}}), "nothing")]
    #[case::class_defaults("StorageClass", json!({"reclaimPolicy": "Delete", "allowVolumeExpansion": false}), "nothing")]
    #[case::priority_defaults("PriorityClass", json!({"globalDefault": false, "preemptionPolicy": "PreemptLowerPriority"}), "nothing")]
    #[case::null("ClusterRole", json!({"aggregationRule": null}), "nothing")]
    #[case::being_deleted("CSIDriver", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"storageCapacity": false}}), "nothing")]
    #[case::changed("CSIDriver", json!({"spec": {"storageCapacity": false}}), "update storageCapacity")]
    #[case::removed("CSIDriver", json!({"spec": {"storageCapacity": null}}), "update storageCapacity")]
    #[case::added("CSIDriver", json!({"spec": {"tokenRequests": [{"audience": "x"}]}}), "update tokenRequests")]
    #[case::two("CSIDriver", json!({"spec": {"podInfoOnMount": true, "seLinuxMount": true}}), "update podInfoOnMount,seLinuxMount")]
    #[case::no_spec("CSIDriver", json!({"spec": null}), "report attachRequired")]
    #[case::immutable("CSIDriver", json!({"spec": {"attachRequired": true}}), "report attachRequired")]
    #[case::immutable_and_another("CSIDriver", json!({"spec": {"attachRequired": true, "storageCapacity": false}}), "report attachRequired")]
    #[case::modes("CSIDriver", json!({"spec": {"volumeLifecycleModes": ["Persistent", "Ephemeral"]}}), "report volumeLifecycleModes")]
    #[case::options("StorageClass", json!({"mountOptions": ["nodev", "noexec"]}), "update mountOptions")]
    #[case::no_options("StorageClass", json!({"mountOptions": null}), "update mountOptions")]
    #[case::topologies("StorageClass", json!({"allowedTopologies": [{"matchLabelExpressions": []}]}), "update allowedTopologies")]
    #[case::parameters("StorageClass", json!({"parameters": {"c": "d"}}), "replace parameters")]
    #[case::binding_mode("StorageClass", json!({"volumeBindingMode": "Immediate", "mountOptions": []}), "replace mountOptions,volumeBindingMode")]
    #[case::value("PriorityClass", json!({"value": 2000}), "replace value")]
    #[case::description("PriorityClass", json!({"description": ""}), "update description")]
    #[case::more_rules("ClusterRole", json!({"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}), "update rules")]
    #[case::no_rules("Role", json!({"rules": null}), "update rules")]
    #[case::aggregated("ClusterRole", json!({"aggregationRule": {"clusterRoleSelectors": []}}), "update aggregationRule")]
    #[case::subjects("ClusterRoleBinding", json!({"subjects": [{"kind": "User", "name": "v"}]}), "update subjects")]
    #[case::role("RoleBinding", json!({"roleRef": {"name": "cluster-admin"}}), "replace roleRef")]
    #[case::foreign("CSIDriver", json!({"metadata": {"labels": null}}), "refuse")]
    #[case::of_another_driver("CSIDriver", json!({"metadata": {"labels": {"app.kubernetes.io/instance": "csi.other.dev"}}}), "refuse")]
    #[case::foreign_and_different("StorageClass", json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}, "provisioner": "q"}), "refuse")]
    fn decides(#[case] kind: &str, #[case] found: Value, #[case] expected: &str) {
        assert_eq!(decided(kind, found), expected);
    }

    #[test]
    fn only_labelled_undeclared_objects_are_removed() {
        let kind = ManagedKind::named("StorageClass").unwrap();
        let ours = object(declared(kind.name), json!({}));
        let theirs = object(declared(kind.name), json!({"metadata": {"labels": null}}));
        let identity = fixtures::identity();
        assert_eq!(
            action(kind, Some(&ours), None, &identity),
            Some(ObjectAction::Create(Box::new(ours.clone())))
        );
        assert_eq!(action(kind, None, Some(&theirs), &identity), None);
        assert_eq!(
            action(kind, None, Some(&ours), &identity),
            Some(ObjectAction::Remove(preconditions(&ours)))
        );
        assert_eq!(action(kind, None, None, &identity), None);
        let kind = ManagedKind::named("CSIDriver").unwrap();
        let driver = object(declared(kind.name), json!({}));
        assert_eq!(action(kind, None, Some(&driver), &identity), None, "a CSIDriver stays");
    }

    #[test]
    fn only_declared_metadata_is_restored() {
        let kind = ManagedKind::named("StorageClass").unwrap();
        let annotated = json!({"metadata": {"annotations": {"a": "1"}, "labels": {"l": "1"}}});
        let wanted = object(declared(kind.name), annotated);
        let changed = json!({"metadata": {"annotations": {"a": "2", "b": "3"}}});
        let found = object(declared(kind.name), changed);
        let Some(ObjectAction::Update { object, fields }) =
            action(kind, Some(&wanted), Some(&found), &fixtures::identity())
        else {
            panic!("the action is no update");
        };
        assert_eq!(fields, ["labels", "annotations"]);
        let annotations = object.metadata.annotations.unwrap();
        assert_eq!((annotations["a"].as_str(), annotations["b"].as_str()), ("1", "3"));
        assert_eq!(object.metadata.labels.unwrap()["l"], "1");
    }

    /// An administrator makes a class the default by an annotation.
    #[test]
    fn a_replaced_object_keeps_undeclared_settings() {
        let kind = ManagedKind::named("StorageClass").unwrap();
        let wanted = object(declared(kind.name), json!({}));
        let annotations = json!({"storageclass.kubernetes.io/is-default-class": "true"});
        let changes = json!({
            "metadata": {"annotations": annotations, "labels": {"team": "x"}, "finalizers": ["example.com/keep"]},
            "parameters": {"c": "d"}, "fieldOfTheFuture": 5,
        });
        let found = object(declared(kind.name), changes);
        let Some(ObjectAction::Replace { object, fields, .. }) =
            action(kind, Some(&wanted), Some(&found), &fixtures::identity())
        else {
            panic!("the action is no replacement");
        };
        assert_eq!(fields, ["parameters"]);
        assert_eq!(json!(object.metadata.annotations), annotations);
        assert_eq!(object.metadata.labels.unwrap()["team"], "x");
        assert_eq!(object.metadata.finalizers, None);
        assert_eq!(
            (&object.data["fieldOfTheFuture"], &object.data["parameters"]),
            (&json!(5), &json!({"a": "b"}))
        );
    }

    #[test]
    fn unknown_declared_field_is_compared() {
        let kind = ManagedKind::named("CSIDriver").unwrap();
        let wanted = object(json!({"spec": {"fieldOfTheFuture": 5}}), json!({}));
        let found = object(json!({"spec": {"fieldOfTheFuture": 6}}), json!({}));
        let Some(ObjectAction::Update { fields, .. }) =
            action(kind, Some(&wanted), Some(&found), &fixtures::identity())
        else {
            panic!("the action is no update");
        };
        assert_eq!(fields, ["fieldOfTheFuture"]);
    }
}
