//! Tables of documents that repeat names of the programs. The sources are read as text, because the harness links to none of the
//! programs.

use std::collections::BTreeSet;

use book::markdown::{code, table};

use crate::read;

const EVENTS: &str = "provisioner/src/api/events.rs";
const ERRORS: &str = "provisioner/src/error.rs";
const CODES: &str = "csi/src/services/rpc.rs";
const CONDITIONS: &str = "loopfs/src/volume_store/condition.rs";
const SETTINGS: &str = "loopfs/src/volume_store/settings.rs";
const NODE_LOSS: &str = "provisioner/src/objects/loss_policy.rs";
const RESERVED: &str = "csi/wire/src/reserved.rs";

const DRIVER: &str = "csi/README.md";
const FAILURES: &str = "docs/src/failures.md";
const STORAGE_CLASS: &str = "docs/src/storage-class.md";

/// Returns the text after `start`, up to `end`.
fn part<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let (_, rest) = text.split_once(start).unwrap_or_else(|| panic!("there is no {start:?}"));
    rest.split_once(end).unwrap_or_else(|| panic!("there is no {end:?} after {start:?}")).0
}

/// Returns the texts between double quotes.
fn literals(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2)
}

/// Returns the reasons of events and their types.
fn reasons() -> BTreeSet<(String, String)> {
    let source = read(EVENTS);
    let arms = source.lines().filter_map(|line| line.trim().strip_prefix("Reason::")?.split_once(" => (\""));
    let named = arms.filter_map(|(_, values)| {
        let (reason, rest) = values.split_once("\", ")?;
        let (type_, _) = rest.split_once(',')?;
        Some((reason.to_owned(), type_.to_lowercase()))
    });
    named.collect()
}

#[test]
fn the_book_explains_every_event() {
    let reasons = reasons();
    let source = read(EVENTS);
    let variants = part(&source, "pub(crate) enum Reason {", "\n}").lines().map(str::trim);
    let variants = variants.filter(|line| line.ends_with(',') && !line.starts_with("///")).count();
    assert_eq!(reasons.len(), variants, "{EVENTS} has reasons that this test does not find: {reasons:?}");
    let rows = table(&read(FAILURES), "## Events");
    let explained: BTreeSet<_> =
        rows.iter().map(|row| (code(&row[0]).to_owned(), row[1].to_lowercase())).collect();
    assert_eq!(explained, reasons, "the table of {FAILURES} (left) and {EVENTS} (right) differ");
    assert!(rows.iter().all(|row| row.len() == 5 && !row[3].is_empty() && !row[4].is_empty()), "{rows:?}");
}

#[test]
fn book_explains_every_error_class() {
    let source = read(ERRORS);
    let classes: BTreeSet<&str> = literals(part(&source, "fn reason(&self)", "\n    }\n")).collect();
    assert!(classes.len() > 10, "{ERRORS} has classes that this test does not find: {classes:?}");
    let page = read(FAILURES);
    let rows = table(&page, "## Classes of errors");
    let explained: BTreeSet<&str> = rows.iter().map(|row| code(&row[0])).collect();
    assert_eq!(explained, classes, "the table of {FAILURES} (left) and {ERRORS} (right) differ");
    assert!(rows.iter().all(|row| row.len() == 3 && !row[1].is_empty() && !row[2].is_empty()), "{rows:?}");
}

/// Returns the name of a gRPC code in the form of the specification: `NotFound` as `NOT_FOUND`.
fn of_the_specification(code: &str) -> String {
    let mut name = String::new();
    for character in code.chars() {
        if character.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(character.to_uppercase());
    }
    name
}

#[test]
fn book_explains_every_csi_code() {
    let source = read(CODES);
    let body = part(&source, "fn code(&self)", "impl From<Error> for Status");
    let codes = body.split("Code::").skip(1);
    let codes: BTreeSet<String> = codes
        .map(|rest| of_the_specification(rest.split(|c: char| !c.is_alphabetic()).next().unwrap()))
        .collect();
    assert!(codes.contains("FAILED_PRECONDITION"), "{codes:?}");
    let rows = table(&read(FAILURES), "## Codes of CSI calls");
    let explained: BTreeSet<String> = rows.iter().map(|row| code(&row[0]).to_owned()).collect();
    assert_eq!(explained, codes, "the table of {FAILURES} (left) and {CODES} (right) differ");
}

/// The book links to this table.
#[test]
fn driver_readme_explains_every_volume_condition() {
    let source = read(CONDITIONS);
    let conditions: BTreeSet<&str> = literals(part(&source, "fn as_str(self)", "\n    }\n")).collect();
    assert!(conditions.contains("StorageFailed"), "{conditions:?}");
    let readme = read(DRIVER);
    let rows = part(&readme, "abnormal for one of these reasons:", "\n### ").lines();
    let names = rows.filter_map(|row| row.strip_prefix("| `")?.split_once('`'));
    let explained: BTreeSet<&str> = names.map(|(name, _)| name).collect();
    assert_eq!(explained, conditions, "the table of {DRIVER} (left) and {CONDITIONS} (right) differ");
}

/// Returns the parameters of a StorageClass, each as the error messages list it: `name (allowed values)`.
fn parameters() -> BTreeSet<String> {
    let source = read(SETTINGS);
    let settings = part(&source, "SETTINGS: &[Setting] = &[", "\n    ];");
    let settings = settings.split("name: ").skip(1).map(|setting| {
        let (constant, rest) = setting.split_once(',').expect("a setting has a name and allowed values");
        let name = literals(part(&source, &format!("const {constant}: &str = "), ";")).next().unwrap();
        format!("{name} ({})", literals(rest).next().unwrap())
    });
    let node_loss = read(NODE_LOSS);
    let node_loss = literals(part(&node_loss, "const ALLOWED: &[&str] = &[", "];")).map(str::to_owned);
    let reserved = read(RESERVED);
    let fstype = literals(part(&reserved, "const FSTYPE: &str = ", ";")).map(str::to_owned);
    settings.chain(node_loss).chain(fstype).collect()
}

#[test]
fn book_lists_every_storage_class_parameter() {
    let parameters = parameters();
    let rows = table(&read(STORAGE_CLASS), "## Parameters");
    let explained: BTreeSet<String> =
        rows.iter().map(|row| format!("{} ({})", code(&row[0]), row[1])).collect();
    assert_eq!(
        explained, parameters,
        "the table of {STORAGE_CLASS} (left) and the sources (right) differ: each parameter needs a row, with its allowed values as in \
         the sources, its default and its meaning"
    );
}
