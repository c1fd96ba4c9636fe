//! Checks the definition of the driver against the sources of the suite, which ignores a key that it does not know.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// The files of Kubernetes with the types of the definition.
const SOURCES: [&str; 4] = [
    "test/e2e/storage/external/external.go",
    "test/e2e/storage/framework/testdriver.go",
    "test/e2e/framework/volume/fixtures.go",
    "test/e2e/framework/timeouts.go",
];
/// The type of the definition.
const DEFINITION: &str = "driverDefinition";
/// The key of the definition that is a map, and the type whose fields are its keys.
const TIMEOUTS: (&str, &str) = ("Timeouts", "TimeoutContext");
/// The type of the capabilities of a driver.
const CAPABILITIES: &str = "map[Capability]bool";

/// Reads the definition at `path`, and checks every key of it. `kubernetes` is the directory of the sources.
///
/// # Errors
/// A key is unknown to the suite, a capability of the suite is not in the definition, or a file cannot be read.
pub(super) fn read(path: &Path, kubernetes: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let definition: Value =
        serde_norway::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    let mut types = Types::default();
    for source in SOURCES {
        let source = kubernetes.join(source);
        let text = std::fs::read_to_string(&source).with_context(|| format!("read {}", source.display()))?;
        types.add(&text);
    }
    let problems = types.problems(&definition);
    anyhow::ensure!(problems.is_empty(), "{}: {}", path.display(), problems.join("; "));
    Ok(definition)
}

/// The struct types of Go sources: the type of each field of each struct. An unnamed struct has the name `OUTER.FIELD`. The capabilities
/// that a driver can have are the fields of [`CAPABILITIES`].
#[derive(Debug, Default)]
struct Types(BTreeMap<String, BTreeMap<String, String>>);

impl Types {
    /// Adds the types of a source that gofmt has formatted.
    fn add(&mut self, source: &str) {
        // The structs around the line, the innermost last.
        let mut open: Vec<String> = Vec::new();
        for line in source.lines().map(str::trim) {
            if let Some(outer) = open.last() {
                if line == "}" {
                    open.pop();
                } else if let Some((field, kind)) = field(line) {
                    let unnamed = kind.ends_with("struct {").then(|| format!("{outer}.{field}"));
                    let kind = unnamed.clone().unwrap_or_else(|| kind.to_owned());
                    let fields = self.0.entry(outer.clone()).or_default();
                    fields.insert(field.to_owned(), kind);
                    open.extend(unnamed);
                }
            } else if let Some(name) =
                line.strip_prefix("type ").and_then(|line| line.strip_suffix(" struct {"))
            {
                self.0.entry(name.to_owned()).or_default();
                open.push(name.to_owned());
            } else if let Some(capability) = capability(line) {
                let capabilities = self.0.entry(CAPABILITIES.to_owned()).or_default();
                capabilities.insert(capability.to_owned(), "bool".to_owned());
            }
        }
    }

    /// Returns what is wrong with a definition.
    fn problems(&mut self, definition: &Value) -> Vec<String> {
        let types = [DEFINITION, TIMEOUTS.1, CAPABILITIES].into_iter();
        let missing = types.filter(|name| self.fields(name).is_none_or(BTreeMap::is_empty));
        let mut problems: Vec<String> = missing
            .map(|name| format!("the sources of Kubernetes have no fields of the type {name}"))
            .collect();
        self.0.entry(DEFINITION.to_owned()).or_default().insert(TIMEOUTS.0.to_owned(), TIMEOUTS.1.to_owned());
        self.check(definition, DEFINITION, "", &mut problems);
        problems
    }

    fn check(&self, value: &Value, kind: &str, path: &str, problems: &mut Vec<String>) {
        let Some(fields) = self.fields(kind) else { return };
        match value {
            Value::Object(entries) => {
                for (key, value) in entries {
                    match fields.get(key) {
                        Some(kind) => self.check(value, kind, &below(path, key), problems),
                        None => problems.push(format!("the suite ignores {}", below(path, key))),
                    }
                }
                // The definition decides about every capability, so that one of a later release is noticed.
                let required = fields.keys().filter(|_| kind == CAPABILITIES);
                let missing = required.filter(|name| !entries.contains_key(*name));
                problems.extend(
                    missing.map(|name| format!("{} is missing: add true or false", below(path, name))),
                );
            }
            Value::Array(items) => items.iter().for_each(|item| self.check(item, kind, path, problems)),
            _ => problems.push(format!("{path} has no keys")),
        }
    }

    fn fields(&self, kind: &str) -> Option<&BTreeMap<String, String>> {
        let name = kind.trim_start_matches(['*', '[', ']']);
        // `storageframework.DriverInfo` of another package. The name of an unnamed struct has a period, too.
        self.0.get(name).or_else(|| self.0.get(name.rsplit('.').next()?))
    }
}

fn below(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Parses `Name string // comment`, a field of a struct.
fn field(line: &str) -> Option<(&str, &str)> {
    let line = line.split(" // ").next().unwrap_or(line);
    let (name, kind) = line.split_once(char::is_whitespace)?;
    let exported = name.starts_with(|char: char| char.is_ascii_uppercase());
    let plain = name.chars().all(|char| char.is_ascii_alphanumeric() || char == '_');
    (exported && plain).then_some((name, kind.trim()))
}

/// Parses `CapBlock Capability = "block" // comment`.
fn capability(line: &str) -> Option<&str> {
    let (declared, value) = line.split_once('=')?;
    let mut words = declared.split_whitespace();
    (words.next()?.starts_with("Cap") && words.next()? == "Capability" && words.next().is_none())
        .then(|| value.trim().strip_prefix('"')?.split('"').next())?
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    const SOURCE: &str = r#"
// driverDefinition describes a driver.
type driverDefinition struct {
	// DriverInfo is static.
	DriverInfo storageframework.DriverInfo

	StorageClass struct {
		FromName bool

		// FromFile is a file.
		FromFile string
	}
	InlineVolumes []struct {
		Attributes map[string]string
	}
	Timeouts map[string]string
}

func (d *driverDefinition) DeepCopyObject() runtime.Object {
	return nil
}

const (
	CapBlock   Capability = "block"      // raw block mode
	CapCloning Capability = "cloning"
)

type DriverInfo struct {
	Name  string
	Range volume.SizeRange
	Capabilities map[Capability]bool
	// [Optional] Parameters
	Options *StressOptions
}

type StressOptions struct {
	NumPods int // of pods
}

type SizeRange struct {
	Min string
}

type TimeoutContext struct {
	PodStart time.Duration
}
"#;

    fn problems(definition: &Value) -> Vec<String> {
        let mut types = Types::default();
        types.add(SOURCE);
        types.problems(definition)
    }

    fn complete() -> Value {
        json!({
            "StorageClass": {"FromName": true, "FromFile": "x"},
            "InlineVolumes": [{"Attributes": {"any": "key"}}],
            "Timeouts": {"PodStart": "1m"},
            "DriverInfo": {
                "Name": "x",
                "Range": {"Min": "1Mi"},
                "Capabilities": {"block": true, "cloning": false},
                "Options": {"NumPods": 1},
            },
        })
    }

    #[test]
    fn definition_with_known_keys_is_accepted() {
        assert_eq!(problems(&complete()), Vec::<String>::new());
    }

    #[rstest]
    #[case::at_the_top("", "ShortName")]
    #[case::in_an_unnamed_struct("/StorageClass", "FromNames")]
    #[case::in_a_list("/InlineVolumes/0", "ReadOnly")]
    #[case::in_a_struct_of_another_package("/DriverInfo", "name")]
    #[case::in_a_struct_below_it("/DriverInfo/Range", "Max")]
    #[case::behind_a_pointer("/DriverInfo/Options", "NumRestarts")]
    #[case::of_the_timeouts("/Timeouts", "PodStarts")]
    #[case::of_the_capabilities("/DriverInfo/Capabilities", "blocks")]
    fn key_ignored_by_suite_is_reported(#[case] below: &str, #[case] key: &str) {
        let mut definition = complete();
        definition.pointer_mut(below).unwrap()[key] = json!({});
        let problems = problems(&definition);
        assert!(problems.len() == 1 && problems[0].starts_with("the suite ignores "), "{problems:?}");
        assert!(problems[0].ends_with(key), "{problems:?}");
    }

    #[test]
    fn missing_capability_is_reported() {
        let mut definition = complete();
        definition["DriverInfo"]["Capabilities"] = json!({"block": true});
        assert_eq!(problems(&definition), ["DriverInfo.Capabilities.cloning is missing: add true or false"]);
    }

    #[test]
    fn sources_without_types_are_refused() {
        let found = Types::default().problems(&json!({}));
        assert!(found[0].contains("no fields of the type driverDefinition"), "{found:?}");
        assert_eq!(found.len(), 3, "{found:?}");
    }
}
