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
fn literals(text: &str) -> impl Iterator<Item = String> {
    text.split('"').skip(1).step_by(2).map(str::to_owned)
}

/// Returns the rows of the table after a heading. Each has all cells.
fn rows(document: &str, heading: &str) -> Vec<Vec<String>> {
    let rows = table(&read(document), heading);
    assert!(!rows.is_empty(), "{document} has no table after {heading:?}");
    let is_whole = |row: &Vec<String>| row.len() == rows[0].len() && row.iter().all(|cell| !cell.is_empty());
    assert!(rows.iter().all(is_whole), "{document}: a row of {heading:?} lacks a cell: {rows:?}");
    rows
}

/// Compares the names that a document explains with those of a source.
fn compare(
    document: &str,
    source: &str,
    explained: impl Iterator<Item = String>,
    names: impl Iterator<Item = String>,
) {
    let [explained, names] = [explained.collect::<BTreeSet<_>>(), names.collect()];
    assert!(!names.is_empty(), "{source} has no names");
    assert_eq!(explained, names, "the table of {document} (left) and {source} (right) differ");
}

#[test]
fn the_book_explains_every_event() {
    let source = read(EVENTS);
    let arms = source.lines().filter_map(|line| line.trim().strip_prefix("Reason::")?.split_once(" => (\""));
    let reasons: Vec<String> = arms
        .filter_map(|(_, values)| {
            let (reason, rest) = values.split_once("\", ")?;
            Some(format!("{reason}, {}", rest.split_once(',')?.0.to_lowercase()))
        })
        .collect();
    let variants = part(&source, "pub(crate) enum Reason {", "\n}").lines().map(str::trim);
    let variants = variants.filter(|line| line.ends_with(',') && !line.starts_with("///")).count();
    assert_eq!(reasons.len(), variants, "{EVENTS} has reasons that this test does not find: {reasons:?}");
    let rows = rows(FAILURES, "## Events").into_iter();
    let explained = rows.map(|row| format!("{}, {}", code(&row[0]), row[1].to_lowercase()));
    compare(FAILURES, EVENTS, explained, reasons.into_iter());
}

#[test]
fn book_explains_every_error_class() {
    let source = read(ERRORS);
    let classes = literals(part(&source, "fn reason(&self)", "\n    }\n"));
    let rows = rows(FAILURES, "## Classes of errors").into_iter();
    compare(FAILURES, ERRORS, rows.map(|row| code(&row[0]).to_owned()), classes);
}

/// The specification has `NOT_FOUND` for `Code::NotFound`.
#[test]
fn book_explains_every_csi_code() {
    let source = read(CODES);
    let codes = part(&source, "fn code(&self)", "impl From<Error> for Status").split("Code::").skip(1);
    let codes = codes.map(|rest| rest.chars().take_while(|c| c.is_alphabetic()).collect::<String>());
    let rows = rows(FAILURES, "## Codes of CSI calls").into_iter();
    let explained = rows.map(|row| code(&row[0]).replace('_', "").to_lowercase());
    compare(FAILURES, CODES, explained, codes.map(|code| code.to_lowercase()));
}

/// The book links to this table.
#[test]
fn driver_readme_explains_every_volume_condition() {
    let (source, readme) = (read(CONDITIONS), read(DRIVER));
    let conditions = literals(part(&source, "fn as_str(self)", "\n    }\n"));
    let rows = part(&readme, "abnormal for one of these reasons:", "\n### ").lines();
    let names = rows.filter_map(|row| Some(row.strip_prefix("| `")?.split_once('`')?.0.to_owned()));
    compare(DRIVER, CONDITIONS, names, conditions);
}

/// Each parameter needs a row, with its allowed values as the error messages list them: `name (allowed values)`.
#[test]
fn book_lists_every_storage_class_parameter() {
    let [source, node_loss, reserved] = [SETTINGS, NODE_LOSS, RESERVED].map(read);
    let settings =
        part(&source, "SETTINGS: &[Setting] = &[", "\n    ];").split("name: ").skip(1).map(|setting| {
            let (constant, rest) = setting.split_once(',').expect("a setting has a name and allowed values");
            let name = literals(part(&source, &format!("const {constant}: &str = "), ";")).next().unwrap();
            format!("{name} ({})", literals(rest).next().unwrap())
        });
    let node_loss = literals(part(&node_loss, "const ALLOWED: &[&str] = &[", "];"));
    let fstype = literals(part(&reserved, "const FSTYPE: &str = ", ";"));
    let parameters: Vec<String> = settings.chain(node_loss).collect();
    let listed = read("harness/tests/floors/compat.txt");
    for parameter in &parameters {
        let name = parameter.split(' ').next().unwrap();
        assert!(
            listed.contains(&format!(" text {name}\n")),
            "add {name} to compat.txt: StorageClasses of users have it"
        );
    }
    let rows = rows(STORAGE_CLASS, "## Parameters").into_iter();
    let explained = rows.map(|row| format!("{} ({})", code(&row[0]), row[1]));
    compare(STORAGE_CLASS, "the sources", explained, parameters.into_iter().chain(fstype));
}
