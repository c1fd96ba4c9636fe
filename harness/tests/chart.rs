//! Compares the Helm chart with the other places that have the same facts. The lane apiserver renders and installs the chart.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

fn csi() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("csi")
}

fn read(path: &str) -> String {
    let path = csi().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

fn yaml(path: &str) -> Value {
    serde_norway::from_str(&read(path)).unwrap()
}

fn schema() -> Value {
    serde_json::from_str(&read("chart/values.schema.json")).unwrap()
}

/// Returns the schema that a reference names, or the given one.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let name = schema["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
    name.map_or(schema, |name| root.pointer(name).unwrap_or_else(|| panic!("no schema {name}")))
}

fn keys(value: &Value) -> BTreeSet<String> {
    value.as_object().into_iter().flat_map(|fields| fields.keys().cloned()).collect()
}

#[test]
fn chart_has_workspace_version() {
    let chart = yaml("chart/Chart.yaml");
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Compares the keys of a map of values with the properties that the schema allows there, and does so for each map in it. Maps with
/// keys of the user's choice have no properties.
fn compare(path: &str, root: &Value, schema: &Value, values: &Value, compared: &mut usize) {
    let schema = resolved(root, schema);
    let Some(properties) = schema.get("properties") else { return };
    assert_eq!(schema["additionalProperties"], false, "{path}: the schema accepts unknown keys");
    for (key, value) in values.as_object().unwrap_or_else(|| panic!("{path} is no map")) {
        let property = properties.get(key).unwrap_or_else(|| panic!("the schema does not know {path}{key}"));
        *compared += 1;
        compare(&format!("{path}{key}."), root, property, value, compared);
    }
}

#[test]
fn schema_and_chart_values_match() {
    let (schema, values) = (schema(), yaml("chart/values.yaml"));
    let mut compared = 0;
    compare("", &schema, &schema, &values, &mut compared);
    // The values have more keys. Fewer would mean that the search is broken.
    assert!(compared > 30, "only {compared} values were compared");
    let mut known = keys(&schema["properties"]);
    // Helm adds this one.
    assert!(known.remove("global"));
    assert_eq!(known, keys(&values));
}

/// Every schema of an object either names its properties and no others, or gives a schema for all of them. Objects of Kubernetes that
/// the API server checks are the exception.
#[test]
fn schema_objects_refuse_unknown_keys() {
    const CHECKED_BY_THE_API_SERVER: [&str; 7] = [
        "nodeAffinity",
        "podAffinity",
        "podAntiAffinity",
        "podSelector",
        "namespaceSelector",
        "ipBlock",
        "global",
    ];
    fn check(name: &str, schema: &Value, checked: &mut usize) {
        if schema["type"] == "object" && !CHECKED_BY_THE_API_SERVER.contains(&name) {
            *checked += 1;
            let others = &schema["additionalProperties"];
            assert!(*others == false || others.is_object(), "{name}: unknown keys are accepted");
        }
        for group in ["properties", "definitions"] {
            for (name, property) in schema[group].as_object().into_iter().flatten() {
                check(name, property, checked);
            }
        }
        if schema["items"].is_object() {
            check(name, &schema["items"], checked);
        }
    }
    let mut checked = 0;
    check("", &schema(), &mut checked);
    assert!(checked > 15, "only {checked} objects were checked");
}

/// Returns the quoted paths in the first statement of a text that begins with a word.
fn paths(text: &str, begin: &str, end: &str) -> BTreeSet<String> {
    let statement = text.split(begin).nth(1).unwrap_or_else(|| panic!("no {begin}"));
    let statement = statement.split(end).next().unwrap();
    statement.split('"').filter(|path| path.starts_with('/')).map(str::to_owned).collect()
}

/// A data directory in `/` has one component, which the schema refuses.
#[test]
fn chart_and_doctor_directories_match() {
    let chart = paths(&read("chart/templates/_objects.tpl"), "$shared := list", "-}}");
    let mut doctor = paths(&read("../loopfs/tool/src/preflight/data_dir.rs"), "const SHARED:", "];");
    assert!(doctor.remove("/"));
    assert_eq!(chart, doctor);
    assert!(chart.contains("/var/lib"), "{chart:?}");
}
