//! Checks on the sources of the workspace that rustc does not make: imports between the files of a crate
//! point down and form no circle, the library has documentation, and names that others depend on do not
//! change.
//!
//! The rules are data: `floors.txt`, `exceptions.txt` and `compat.txt` beside this file. A failure prints the lines to add and
//! to remove. `UPDATE_FLOORS=1 cargo test -p harness --test floors` writes them, and then passes.

mod compat;
mod imports;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use imports::Imports;
use table::Table;

const UPDATE: &str = "UPDATE_FLOORS";

/// A crate of the workspace.
pub(crate) struct Crate {
    /// Its directory, as `Cargo.toml` of the workspace lists it.
    pub(crate) name: String,
    pub(crate) directory: PathBuf,
}

fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut above = manifest.ancestors();
    above
        .find(|directory| directory.join("Cargo.lock").is_file())
        .expect("a workspace has a Cargo.lock")
        .to_owned()
}

/// Returns the crates of the workspace.
pub(crate) fn crates() -> Vec<Crate> {
    let root = workspace();
    let text = fs::read_to_string(root.join("Cargo.toml")).expect("read Cargo.toml of the workspace");
    let manifest: toml::Table = text.parse().expect("parse Cargo.toml of the workspace");
    let members = manifest["workspace"]["members"].as_array().expect("the workspace has members");
    let members = members.iter().map(|member| member.as_str().expect("a member is a path").to_owned());
    members.map(|name| Crate { directory: root.join(&name), name }).collect()
}

fn package_name(directory: &Path) -> String {
    let text = fs::read_to_string(directory.join("Cargo.toml")).expect("read a member's Cargo.toml");
    let manifest: toml::Table = text.parse().expect("parse a member's Cargo.toml");
    manifest["package"]["name"].as_str().expect("a package has a name").replace('-', "_")
}

fn data_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/floors").join(name)
}

/// Compares the lines of a data file with those that the sources require. `optional` lines may be absent.
pub(crate) fn compare(name: &str, wanted: &BTreeSet<String>, optional: impl Fn(&str) -> bool, why: &str) {
    let path = data_file(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
    let (comments, rules): (Vec<&str>, Vec<&str>) =
        text.lines().filter(|line| !line.trim().is_empty()).partition(|line| line.starts_with('#'));
    let there: BTreeSet<String> = rules.iter().map(|line| (*line).to_owned()).collect();
    let missing: Vec<&String> = wanted.difference(&there).collect();
    let stale: Vec<&String> = there.difference(wanted).filter(|line| !optional(line)).collect();
    if missing.is_empty() && stale.is_empty() {
        return;
    }
    if std::env::var_os(UPDATE).is_some() {
        let kept = there.iter().filter(|line| !stale.contains(line));
        let lines: BTreeSet<&str> = kept.chain(wanted).map(String::as_str).collect();
        let text: Vec<&str> = comments.into_iter().chain(lines).collect();
        return fs::write(&path, text.join("\n") + "\n").expect("write the data file");
    }
    let lines = |lines: &[&String]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    panic!(
        "{why}\n\nadd to {name}:\n{}\nremove from {name}:\n{}\nor run with {UPDATE}=1",
        lines(&missing),
        lines(&stale)
    );
}

fn all_imports() -> BTreeMap<String, Imports> {
    let read = |member: Crate| {
        let imports = Imports::read(&member.directory, &package_name(&member.directory));
        (member.name, imports)
    };
    crates().into_iter().map(read).collect()
}

/// This is one test, because the floors have to be written before the exceptions from them are counted.
#[test]
fn imports_point_down_without_circles() {
    let imports = all_imports();
    let table = Table::read(&data_file("floors.txt"));
    compare(
        "floors.txt",
        &table.rows_needed(&imports),
        |line| table.is_in_use(line, &imports),
        "each file needs a floor, and each floor a file",
    );
    let table = Table::read(&data_file("floors.txt"));
    let mut exceptions = BTreeSet::new();
    for (name, imports) in &imports {
        exceptions
            .extend(imports.circles().iter().map(|circle| format!("{name} circle: {}", circle.join(" "))));
        let upward = imports.files.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
        let upward = upward.filter(|(from, to)| !table.allows(name, from, to));
        exceptions.extend(upward.map(|(from, to)| format!("{name} import: {from} -> {to}")));
    }
    compare(
        "exceptions.txt",
        &exceptions,
        |_| false,
        "a line to add is a circle of files, or an import that floors.txt does not allow: change the code, not the list; \
         a line to remove is an exception that nothing needs any longer",
    );
}

#[test]
fn loopfs_enables_missing_docs_lint() {
    let root = workspace().join("loopfs/src/lib.rs");
    let parsed = syn::parse_file(&fs::read_to_string(root).expect("read lib.rs")).expect("parse lib.rs");
    let lints = parsed
        .attrs
        .iter()
        .filter(|attribute| ["warn", "deny"].iter().any(|level| attribute.path().is_ident(level)));
    let on = lints.filter_map(|attribute| attribute.meta.require_list().ok());
    let on = on
        .filter(|list| list.tokens.to_string().split(',').any(|lint| lint.trim() == "missing_docs"))
        .count();
    assert_eq!(on, 1, "lane unit denies warnings of loopfs, so missing_docs has to be at least one");
}
