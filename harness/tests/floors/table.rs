//! The floors of each crate: which entries of its folders may import which others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::imports::Imports;

/// Rows by crate and entry. An entry is a file or a folder below `src`, such as `cluster` or `volume_store/space`.
pub(crate) struct Table {
    rows: BTreeMap<(String, String), Row>,
}

struct Row {
    floor: usize,
    /// Entries of the same floor or a higher one that this entry may import.
    arrows: BTreeSet<String>,
}

/// Parses `CRATE FLOOR ENTRY [-> ENTRY..]`.
fn parse(line: &str) -> ((String, String), Row) {
    let mut words = line.split_whitespace();
    let mut word =
        || words.next().unwrap_or_else(|| panic!("floors.txt: {line:?} is not `CRATE FLOOR ENTRY`"));
    let (name, floor, entry) = (word().to_owned(), word(), word().to_owned());
    let floor = floor.parse().unwrap_or_else(|_| panic!("floors.txt: {floor:?} in {line:?} is not a number"));
    let arrows = words.filter(|word| *word != "->").map(str::to_owned).collect();
    ((name, entry), Row { floor, arrows })
}

impl Table {
    pub(crate) fn read(path: &Path) -> Table {
        let text = fs::read_to_string(path).expect("read floors.txt");
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        Table { rows: lines.map(parse).collect() }
    }

    fn row(&self, name: &str, entry: &str) -> Option<&Row> {
        self.rows.get(&(name.to_owned(), entry.to_owned()))
    }

    /// Returns `true` if a file may import another one: it is in the same entry, or in one of a higher floor, or has an arrow.
    pub(crate) fn allows(&self, name: &str, from: &str, to: &str) -> bool {
        let Some((from, to)) = entries(from, to) else { return true };
        match (self.row(name, &from), self.row(name, &to)) {
            (Some(from), Some(below)) => below.floor < from.floor || from.arrows.contains(&to),
            // The table has no rows for this folder.
            _ => true,
        }
    }

    /// Returns the rows that are missing, each with a floor above everything that the entry imports. Every
    /// entry of `src` needs a row. An entry of a folder needs one if another entry of the folder has one.
    pub(crate) fn rows_needed(&self, imports: &BTreeMap<String, Imports>) -> BTreeSet<String> {
        let mut rows = BTreeSet::new();
        for (name, imports) in imports {
            let folders: BTreeSet<&str> = self
                .rows
                .keys()
                .filter(|(of, _)| of == name)
                .map(|(_, entry)| folder(entry))
                .chain([""])
                .collect();
            for folder in folders {
                rows.extend(self.rows_of_folder(name, folder, imports));
            }
        }
        rows
    }

    fn rows_of_folder(&self, name: &str, within: &str, imports: &Imports) -> BTreeSet<String> {
        let mut below: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in &imports.files {
            let Some(entry) = entry_in(within, from) else { continue };
            let others = to.iter().filter_map(|to| entry_in(within, to)).filter(|other| *other != entry);
            below.entry(entry.clone()).or_default().extend(others);
        }
        let mut floors: BTreeMap<&str, usize> = BTreeMap::new();
        for entry in below.keys() {
            if let Some(row) = self.row(name, entry) {
                floors.insert(entry, row.floor);
            }
        }
        let new: Vec<&str> =
            below.keys().map(String::as_str).filter(|entry| !floors.contains_key(entry)).collect();
        let given = floors.clone();
        floors.extend(new.iter().map(|entry| (*entry, 1)));
        // Entries on a circle get the same floor. Otherwise, each would have to be above the other without
        // end.
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            below.keys().map(|entry| (entry.as_str(), reach(&below, entry))).collect();
        loop {
            let mut changed = false;
            for entry in &new {
                let circle = |other: &str| reached.get(other).is_some_and(|reached| reached.contains(entry));
                let imported = below[*entry].iter().map(String::as_str);
                let others = imported.map(|other| floors[other] + usize::from(!circle(other)));
                let floor = others.max().unwrap_or(1);
                // On a circle with an entry of the table, the floor of that entry is enough.
                if floor > floors[entry] && !given.contains_key(entry) {
                    floors.insert(entry, floor);
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        new.into_iter().map(|entry| format!("{name} {} {entry}", floors[entry])).collect()
    }

    /// Returns `true` if the row's entry and the entries of its arrows exist.
    pub(crate) fn is_in_use(&self, line: &str, imports: &BTreeMap<String, Imports>) -> bool {
        let ((name, entry), row) = parse(line);
        let exists = |entry: &str| {
            let below = format!("{entry}/");
            imports.get(&name).is_some_and(|imports| {
                imports.files.keys().any(|file| file == entry || file.starts_with(&below))
            })
        };
        exists(&entry) && row.arrows.iter().all(|arrow| exists(arrow))
    }
}

fn reach<'a>(below: &'a BTreeMap<String, BTreeSet<String>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(entry) = open.pop() {
        let others = below.get(entry).into_iter().flatten();
        open.extend(others.map(String::as_str).filter(|other| seen.insert(*other)));
    }
    seen
}

fn folder(entry: &str) -> &str {
    entry.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Returns the entry of a folder that a file is in. A folder's own file is in none of its entries.
fn entry_in(folder: &str, file: &str) -> Option<String> {
    let below = if folder.is_empty() { file } else { file.strip_prefix(folder)?.strip_prefix('/')? };
    let first = below.split('/').next()?;
    Some(if folder.is_empty() { first.to_owned() } else { format!("{folder}/{first}") })
}

/// Returns the entries of two files in the lowest folder that has both, if they differ. A folder's own file
/// re-exports what is in the folder, and a file that imports a name defined in it is on a circle with it.
fn entries(from: &str, to: &str) -> Option<(String, String)> {
    let (from, to): (Vec<&str>, Vec<&str>) = (from.split('/').collect(), to.split('/').collect());
    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
    (common < from.len() && common < to.len()).then(|| (from[..=common].join("/"), to[..=common].join("/")))
}

#[test]
fn entries_are_compared_in_common_folder() {
    let entries = |from, to| entries(from, to).map(|(from, to)| format!("{from} {to}"));
    assert_eq!(entries("cluster/node", "vm/machine").as_deref(), Some("cluster vm"));
    assert_eq!(entries("store/space/count", "store/create").as_deref(), Some("store/space store/create"));
    assert_eq!(entries("store", "store/create"), None);
}
