//! Compares the objects that two tools render.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use kube::ResourceExt;
use serde_json::{Value, json};
use testvm_cluster::manifests::{Manifests, documents};

use crate::helm::is_kept;

/// Objects by kind, namespace and name.
pub(super) type Objects = BTreeMap<String, Value>;

/// The label of the objects that the controller keeps with the component builtin-objects, and its value there.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const MANAGER: &str = "loopfs-provisioner";
/// The annotation with which Helm keeps an object.
const KEEP: &str = "helm.sh/resource-policy";
/// The label that these objects have in addition.
const INSTANCE: &str = "app.kubernetes.io/instance";

/// Returns the objects in a form in which only differences of meaning are left: containers and their variables are sorted, and the files
/// of a ConfigMap are parsed.
///
/// # Errors
/// There are two objects of one name, or a file of a ConfigMap is no YAML.
pub(super) fn objects(manifests: &Manifests) -> Result<Objects> {
    let mut objects = Objects::new();
    for object in manifests.objects() {
        let kind = object.types.as_ref().context("an object has no kind")?.kind.clone();
        let name = format!("{kind} {}/{}", object.namespace().unwrap_or_default(), object.name_any());
        let mut value = serde_json::to_value(object)?;
        if kind == "ConfigMap"
            && let Some(Value::Object(files)) = value.get_mut("data")
        {
            for (file, text) in files.iter_mut() {
                let parsed = documents(text.as_str().unwrap_or_default());
                *text = Value::Array(parsed.with_context(|| format!("parse {file} in {name}"))?);
            }
        }
        sort_named(&mut value);
        anyhow::ensure!(!objects.contains_key(&name), "{name} is rendered twice");
        objects.insert(name, value);
    }
    Ok(objects)
}

/// Sorts the containers of pods, which kustomize reorders with a patch, and their variables. The order of the variables has a meaning
/// only if one refers to another, and none does.
fn sort_named(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                if let ("containers" | "env", Value::Array(items)) = (name.as_str(), &mut *field) {
                    items.sort_by_key(|item| item["name"].to_string());
                }
                sort_named(field);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(sort_named),
        _ => {}
    }
}

/// Adds the annotation with which Helm deletes neither the Namespace nor the CSIDriver.
pub(super) fn as_kept(objects: &mut Objects) {
    for (name, object) in objects.iter_mut() {
        if is_kept(name) {
            object["metadata"]["annotations"] = json!({KEEP: "keep"});
        }
    }
}

/// Changes the objects of the component builtin-objects, as kustomize renders them, to what the chart must render. Helm sets the label
/// `app.kubernetes.io/managed-by` of its objects itself, and the controller changes only objects that have its own value there. So
/// the controller creates the classes, and Helm keeps the CSIDriver and the roles.
pub(super) fn as_shared_with_the_controller(objects: &mut Objects) {
    objects.retain(|name, _| !name.starts_with("StorageClass "));
    for (name, object) in objects.iter_mut() {
        if name.starts_with("ConfigMap ")
            && let Some(Value::Object(files)) = object.get_mut("data")
        {
            files.remove("rbac.yaml");
            files.remove("csidriver.yaml");
        }
        let Some(Value::Object(metadata)) = object.get_mut("metadata") else { continue };
        let Some(Value::Object(labels)) = metadata.get_mut("labels") else { continue };
        if labels.get(MANAGED_BY).is_some_and(|manager| manager == MANAGER) {
            labels.remove(MANAGED_BY);
            labels.remove(INSTANCE);
        }
        if labels.is_empty() {
            metadata.remove("labels");
        }
    }
}

/// Returns the differences, one line each.
pub(super) fn differences(expected: &Objects, found: &Objects) -> Vec<String> {
    let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let mut differences = Vec::new();
    for name in names {
        match (expected.get(name), found.get(name)) {
            (Some(expected), Some(found)) => {
                let [expected, found] = [expected, found].map(|object| {
                    let mut all = BTreeMap::new();
                    leaves(name.clone(), object, &mut all);
                    all
                });
                let paths: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
                let text = |value: Option<&&Value>| value.map_or("nothing".to_owned(), ToString::to_string);
                for path in paths.into_iter().filter(|path| expected.get(*path) != found.get(*path)) {
                    let (expected, found) = (text(expected.get(path)), text(found.get(path)));
                    differences.push(format!("{path} is {found}, expected {expected}"));
                }
            }
            (Some(_), None) => differences.push(format!("{name} is missing")),
            (None, _) => differences.push(format!("{name} is rendered and must not be")),
        }
    }
    differences
}

/// Adds the scalars, empty lists and empty maps in a value, by their paths.
fn leaves<'v>(path: String, value: &'v Value, all: &mut BTreeMap<String, &'v Value>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields.iter().for_each(|(name, field)| leaves(format!("{path}.{name}"), field, all));
        }
        Value::Array(items) if !items.is_empty() => {
            let items = items.iter().enumerate();
            items.for_each(|(index, item)| leaves(format!("{path}[{index}]"), item, all));
        }
        _ => _ = all.insert(path, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Objects {
        objects(&Manifests::from_text(text).unwrap()).unwrap()
    }

    /// Environment variables have no order, and comments in a ConfigMap do not count.
    #[test]
    fn order_and_comments_are_no_difference() {
        let expected = parsed(
            "{kind: DaemonSet, apiVersion: apps/v1, metadata: {name: d}, spec: {env: [{name: a}, {name: b}]}}\n---\n\
             {kind: ConfigMap, apiVersion: v1, metadata: {name: c}, data: {f: \"# x\\na: 1\\n\"}}\n",
        );
        let found = parsed(
            "{kind: ConfigMap, apiVersion: v1, metadata: {name: c}, data: {f: \"---\\n{a: 1}\"}}\n---\n\
             {kind: DaemonSet, apiVersion: apps/v1, metadata: {name: d}, spec: {env: [{name: b}, {name: a}]}}\n",
        );
        assert_eq!(differences(&expected, &found), Vec::<String>::new());
    }

    #[test]
    fn differences_name_object_and_field() {
        let expected = parsed(
            "{kind: Role, apiVersion: v1, metadata: {name: r, namespace: n}, rules: [{verbs: [get]}], x: 1}\n---\n\
             {kind: Service, apiVersion: v1, metadata: {name: s}}\n",
        );
        let found = parsed(
            "{kind: Role, apiVersion: v1, metadata: {name: r, namespace: n}, rules: [{verbs: [list]}], y: 2}\n---\n\
             {kind: Secret, apiVersion: v1, metadata: {name: t}}\n",
        );
        assert_eq!(
            differences(&expected, &found),
            [
                "Role n/r.rules[0].verbs[0] is \"list\", expected \"get\"",
                "Role n/r.x is nothing, expected 1",
                "Role n/r.y is 2, expected nothing",
                "Secret /t is rendered and must not be",
                "Service /s is missing",
            ]
        );
    }

    #[test]
    fn duplicate_object_names_are_refused() {
        let text = "{kind: A, apiVersion: v1, metadata: {name: a}}\n---\n{kind: A, apiVersion: v1, metadata: {name: a}}";
        let error = objects(&Manifests::from_text(text).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "A /a is rendered twice");
    }

    /// The controller creates the storage classes, and Helm keeps the CSIDriver and the roles.
    #[test]
    fn shared_objects_stay_with_their_owner() {
        let labels =
            "labels: {app.kubernetes.io/managed-by: loopfs-provisioner, app.kubernetes.io/instance: d}";
        let text = format!(
            "{{kind: StorageClass, apiVersion: v1, metadata: {{name: s, {labels}}}}}\n---\n\
             {{kind: Role, apiVersion: v1, metadata: {{name: r, {labels}}}}}\n---\n\
             {{kind: ConfigMap, apiVersion: v1, metadata: {{name: c}}, data: {{rbac.yaml: 'a: 1', x.yaml: 'b: 1'}}}}\n"
        );
        let mut found = parsed(&text);
        as_shared_with_the_controller(&mut found);
        let expected = parsed(
            "{kind: Role, apiVersion: v1, metadata: {name: r}}\n---\n\
             {kind: ConfigMap, apiVersion: v1, metadata: {name: c}, data: {x.yaml: 'b: 1'}}\n",
        );
        assert_eq!(differences(&expected, &found), Vec::<String>::new());
    }
}
