//! Checks on the sources of the workspace that rustc does not make: imports between the files of a crate point down and form no
//! circle, and names that others depend on do not change.
//!
//! The rules are data: `floors.txt` and `compat.txt` beside this file. A failure prints the lines to add and to remove.
//! `UPDATE_FLOORS=1 cargo test -p harness --test floors` writes them.

mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use sources::{Imports, Sources};

const UPDATE: &str = "UPDATE_FLOORS";

/// The prefix of the extended attributes on the disk.
const ATTRIBUTES: &str = "trusted.loopfs.";

/// The floors of a folder, the lowest first, with their files and folders.
type Floors = Vec<BTreeSet<String>>;

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is above this crate")
}

/// Returns the crates of the workspace by their directories, as `Cargo.toml` lists them.
fn crates() -> BTreeMap<String, Sources> {
    let text = fs::read_to_string(workspace().join("Cargo.toml")).expect("read Cargo.toml of the workspace");
    let manifest: toml::Table = text.parse().expect("parse Cargo.toml of the workspace");
    let members = manifest["workspace"]["members"].as_array().expect("the workspace has members");
    let members = members.iter().map(|member| member.as_str().expect("a member is a path").to_owned());
    members.map(|name| (name.clone(), Sources::read(&workspace().join(name)))).collect()
}

/// Returns the comments and the other lines of a data file.
fn read(name: &str) -> (PathBuf, Vec<String>, Vec<String>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/floors").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
    let (comments, lines) = text.lines().map(str::to_owned).partition(|line| line.starts_with('#'));
    (path, comments, lines)
}

/// Returns the lines, those of floors after their folder: other folders have equal ones.
fn with_folders(lines: &[String]) -> Vec<String> {
    let mut folder = "";
    let with_folder = lines.iter().map(|line| {
        if line.starts_with(' ') {
            return format!("{folder}:{line}");
        }
        folder = line;
        line.clone()
    });
    with_folder.collect()
}

/// Writes a data file whose lines are not as required, or fails.
fn update(name: &str, required: &[String], why: &str) {
    let (path, comments, lines) = read(name);
    if lines == required {
        return;
    }
    if std::env::var_os(UPDATE).is_some() {
        let text = comments.iter().chain(required).map(|line| format!("{line}\n")).collect::<String>();
        return fs::write(&path, text).expect("write the data file");
    }
    let without = |lines: &[String], others: &[String]| {
        lines.iter().filter(|line| !others.contains(line)).cloned().collect::<Vec<_>>().join("\n")
    };
    let (required, lines) = (with_folders(required), with_folders(&lines));
    let (add, remove) = (without(&required, &lines), without(&lines, &required));
    panic!("{why}\n\nadd to {name}:\n{add}\n\nremove from {name}:\n{remove}\n\nor run with {UPDATE}=1");
}

/// Returns what each file and folder in a folder imports from the others there. The folder's own file is none of them: it re-exports
/// what is in the folder, and a file that imports a name defined in it is on a circle with it.
fn imports_within(folder: &str, files: &Imports) -> Imports {
    let entry = |file: &str| {
        let below = if folder.is_empty() { file } else { file.strip_prefix(folder)?.strip_prefix('/')? };
        below.split('/').next().map(str::to_owned)
    };
    let mut imports = Imports::new();
    for (from, others) in files {
        if let Some(from) = entry(from) {
            let others: Vec<_> = others.iter().filter_map(|to| entry(to)).filter(|to| *to != from).collect();
            imports.entry(from).or_default().extend(others);
        }
    }
    imports
}

/// Returns the floors without entries that do not exist, and with each new entry one floor above everything that it imports.
fn place(floors: &Floors, imports: &Imports) -> Floors {
    let floor = |entry: &String| floors.iter().position(|floor| floor.contains(entry));
    let mut placed: BTreeMap<&String, usize> =
        imports.keys().map(|entry| (entry, floor(entry).unwrap_or(0))).collect();
    let new: Vec<&String> = imports.keys().filter(|entry| floor(entry).is_none()).collect();
    // Each round raises the entries that import those of the last one. On a circle, this would not end.
    for entry in new.iter().flat_map(|_| &new) {
        let above = imports[*entry].iter().map(|other| placed[other] + 1).max();
        placed.insert(entry, above.unwrap_or(0));
    }
    let mut all = vec![BTreeSet::new(); placed.values().max().map_or(0, |highest| highest + 1)];
    placed.into_iter().for_each(|(entry, floor)| _ = all[floor].insert(entry.clone()));
    all.retain(|floor| !floor.is_empty());
    all
}

/// Returns the imports that do not lead to a lower floor.
fn upward(floors: &Floors, imports: &Imports) -> Vec<String> {
    let floor = |entry: &String| floors.iter().position(|floor| floor.contains(entry));
    let pairs = imports.iter().flat_map(|(from, others)| others.iter().map(move |to| (from, to)));
    pairs.filter(|(from, to)| floor(to) >= floor(from)).map(|(from, to)| format!("{from} -> {to}")).collect()
}

/// Returns the sets of files that reach each other.
fn circles(files: &Imports) -> BTreeSet<Vec<&String>> {
    let reachable = |from| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            open.extend(files[file].iter().filter(|file| seen.insert(*file)));
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        files.keys().map(|file| (file, reachable(file))).collect();
    let circle = |file| reach[file].iter().copied().filter(|other| reach[other].contains(file)).collect();
    files.keys().map(circle).filter(|circle: &Vec<_>| !circle.is_empty()).collect()
}

#[test]
fn imports_point_down_without_circles() {
    let crates: BTreeMap<String, Imports> =
        crates().into_iter().map(|(name, sources)| (name, sources.imports())).collect();
    let mut folders: BTreeMap<String, Floors> =
        crates.keys().map(|name| (format!("{name}/src"), Vec::new())).collect();
    let (_, _, lines) = read("floors.txt");
    let mut folder = String::new();
    for line in lines {
        match line.strip_prefix(' ') {
            Some(floor) => {
                let floor = floor.split_whitespace().map(str::to_owned).collect();
                folders.entry(folder.clone()).or_default().push(floor);
            }
            None => folder = line,
        }
    }
    let (mut required, mut wrong) = (Vec::new(), Vec::new());
    for (folder, floors) in folders {
        let (name, below) = folder.split_once("/src").expect("a folder is in src");
        let imports = crates.get(name).map(|files| imports_within(below.trim_start_matches('/'), files));
        let Some(imports) = imports.filter(|imports| !imports.is_empty()) else { continue };
        let floors = place(&floors, &imports);
        wrong.extend(upward(&floors, &imports).into_iter().map(|import| format!("{folder}: {import}")));
        required.push(folder);
        let line =
            |floor: &BTreeSet<String>| floor.iter().map(|entry| format!(" {entry}")).collect::<String>();
        required.extend(floors.iter().map(|floor| format!(" {}", line(floor))));
    }
    for (name, files) in &crates {
        wrong.extend(circles(files).iter().map(|circle| format!("{name}: a circle of {circle:?}")));
    }
    update("floors.txt", &required, "each file needs a floor, and each floor a file");
    assert!(wrong.is_empty(), "imports that floors.txt does not allow:\n{}", wrong.join("\n"));
}

#[test]
fn new_entries_are_above_their_imports() {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let files = [
        ("lib", &["store"][..]),
        ("store", &["store/create"]),
        ("store/create", &["store/space/count", "sys"]),
        ("store/space/count", &["store"]),
        ("sys", &[]),
    ];
    let files: Imports = files.map(|(file, others)| (file.to_owned(), set(others))).into();
    assert_eq!(circles(&files).into_iter().next().unwrap().len(), 3);
    let folder = imports_within("store", &files);
    assert_eq!(place(&vec![set(&["gone"]), set(&["space"])], &folder), [set(&["space"]), set(&["create"])]);
    let root = imports_within("", &files);
    let floors = place(&Vec::new(), &root);
    assert_eq!(floors, [set(&["sys"]), set(&["store"]), set(&["lib"])]);
    assert_eq!(upward(&floors, &root), Vec::<String>::new());
    assert_eq!(upward(&vec![set(&["lib", "store", "sys"])], &root), ["lib -> store", "store -> sys"]);
}

/// Scripts, dashboards, manifests and stored volumes depend on these names. A `text` without the prefix is a literal that the list has
/// by choice. The programs of `harness` have no users outside this repository.
#[test]
fn public_names_are_unchanged() {
    let (_, _, listed) = read("compat.txt");
    let (mut names, mut texts) = (BTreeSet::new(), BTreeSet::new());
    for (name, sources) in crates().iter().filter(|(name, _)| !name.starts_with("harness")) {
        names.extend(sources.flags().map(|flag| format!("{name} flag {flag}")));
        let is_attribute = |text: &&String| text.starts_with(ATTRIBUTES) && text.as_str() != ATTRIBUTES;
        names.extend(sources.texts().filter(is_attribute).map(|text| format!("{name} text {text}")));
        texts.extend(sources.texts().map(|text| format!("{name} text {text}")));
    }
    names.extend(listed.into_iter().filter(|line| texts.contains(line)));
    update(
        "compat.txt",
        &Vec::from_iter(names),
        "a line to remove is a name that scripts, dashboards, manifests or stored volumes use and the sources have no longer: keep \
         the name, or write the change into CHANGELOG.md first; a line to add is a new name, which has to stay from now on",
    );
}
