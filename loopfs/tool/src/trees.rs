//! `quota tag` and `quota check`: setting and checking the project of the inodes of a tree.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use loopfs::project_quota::{Limit, Limits, ProjectId, Release, Usage};
use loopfs::project_tree::{
    HardLinks, SkipReason, Skipped, SkippedEntry, StrayInode, TreeCheck, TreeReport, check_tree,
    limit_directory, tag_tree, unlimit_directory,
};
use loopfs::{Bytes, Inodes};
use serde::Serialize;

use crate::output::{Output, Side, Table, object, printable, yes_no};
use crate::project::{open, project_id, project_or_own, sync};
use crate::size::{nonzero, nonzero_number};

#[derive(Args, Debug)]
pub(crate) struct Tag {
    /// The root of the tree
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The project, 1 to 4294967294
    #[arg(long, value_parser = project_id)]
    id: ProjectId,
    /// Files with several hard links, some of which may be outside the tree: `skip` leaves them in their project and prints them,
    /// `tag` puts them into the project under all their names
    #[arg(long, value_name = "skip|tag", default_value = "skip", value_parser = hard_links)]
    hard_links: HardLinks,
}

#[derive(Args, Debug)]
#[group(id = "limits", multiple = true, required = true, args = ["bytes", "inodes"])]
pub(crate) struct LimitDirectory {
    /// The directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The limit of its disk usage
    #[arg(long, value_name = "SIZE", value_parser = nonzero)]
    bytes: Option<u64>,
    /// The limit of its inodes
    #[arg(long, value_name = "NUMBER", value_parser = nonzero_number)]
    inodes: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct UnlimitDirectory {
    /// The directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct CheckTree {
    /// The root of the tree
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The project, 1 to 4294967294. The default is the project of the root
    #[arg(long, value_parser = project_id)]
    id: Option<ProjectId>,
}

fn hard_links(text: &str) -> Result<HardLinks, String> {
    match text {
        "skip" => Ok(HardLinks::Skip),
        "tag" => Ok(HardLinks::Tag),
        _ => Err("write skip or tag".to_owned()),
    }
}

impl Tag {
    pub(crate) fn run(&self) -> Result<Output> {
        let root = open(&self.directory)?;
        let report = tag_tree(root.as_fd(), self.id, self.hard_links, |_| {})
            .with_context(|| lossy(&self.directory))?;
        sync(&root, &self.directory)?;
        let good = is_minor(&report.skipped);
        Ok(Output::new(tag_text(self.id, &report), &tag_json(self.id, &report))?.good(good))
    }
}

impl LimitDirectory {
    pub(crate) fn run(&self) -> Result<Output> {
        let directory = open(&self.directory)?;
        let limits = Limits {
            bytes: self.bytes.map_or(Limit::Keep, |bytes| Limit::Hard(Bytes(bytes))),
            inodes: self.inodes.map_or(Limit::Keep, |inodes| Limit::Hard(Inodes(inodes))),
        };
        let report = limit_directory(&directory, limits).with_context(|| lossy(&self.directory))?;
        let id = project_or_own(None, &directory, &self.directory)?;
        let good = is_minor(&report.skipped);
        Ok(Output::new(tag_text(id, &report), &tag_json(id, &report))?.good(good))
    }
}

impl UnlimitDirectory {
    pub(crate) fn run(&self) -> Result<Output> {
        let released = unlimit_directory(open(&self.directory)?).with_context(|| lossy(&self.directory))?;
        let (text, bytes, inodes) = match released {
            Release::Freed => (String::new(), 0, 0),
            Release::Draining(Usage { id, bytes, inodes, .. }) => {
                let text = format!("project {id}: {bytes} and {inodes} are still charged to it\n");
                (text, bytes.0, inodes.0)
            }
        };
        let json = object! { bytes: bytes, inodes: inodes };
        Ok(Output::new(text, &json)?.good(released == Release::Freed))
    }
}

impl CheckTree {
    pub(crate) fn run(&self) -> Result<Output> {
        let root = open(&self.directory)?;
        let id = project_or_own(self.id, &root, &self.directory)?;
        let check = check_tree(root.as_fd(), id, |_| {}).with_context(|| lossy(&self.directory))?;
        let good = check.is_clean() && is_complete(&check);
        Ok(Output::new(check_text(id, &check), &check_json(id, &check))?.good(good))
    }
}

fn tag_json(id: ProjectId, report: &TreeReport) -> impl Serialize {
    let TreeReport { passes, changed, names, directories, skipped } = report;
    object! {
        id: id.get(),
        changed: changed,
        passes: passes,
        names: names,
        directories: directories,
        left_out: skipped_json(skipped),
    }
}

fn tag_text(id: ProjectId, report: &TreeReport) -> String {
    let TreeReport { passes: _, changed, names, directories, skipped } = report;
    format!(
        "project {id}: {changed} changed of {names} names, {directories} of them directories\n{}",
        skipped_text(skipped)
    )
}

fn check_json(id: ProjectId, check: &TreeCheck) -> impl Serialize {
    let stray = |stray: &StrayInode| {
        let StrayInode { path, project, inherits } = stray;
        object! { path: lossy(path), id: *project, inherits: *inherits }
    };
    object! {
        id: id.get(),
        clean: check.is_clean(),
        complete: is_complete(check),
        names: check.names,
        directories: check.directories,
        other_project: check.other_project,
        not_inheriting: check.not_inheriting,
        strays: check.strays.iter().map(stray).collect::<Vec<_>>(),
        left_out: skipped_json(&check.skipped),
        disturbed: check.disturbed,
    }
}

/// Returns `true` if the check has reached every inode that can leave the project.
fn is_complete(check: &TreeCheck) -> bool {
    is_minor(&check.skipped) && !check.disturbed
}

fn check_text(id: ProjectId, check: &TreeCheck) -> String {
    let TreeCheck { names, directories, other_project, not_inheriting, .. } = check;
    let mut text = format!(
        "project {id}: {names} names, {directories} of them directories; {other_project} with another id, \
         {not_inheriting} directories without project inheritance\n",
    );
    if !check.strays.is_empty() {
        let mut table = Table::new([("ID", Side::Right), ("INHERITS", Side::Left), ("PATH", Side::Left)]);
        for StrayInode { path, project, inherits } in &check.strays {
            table.row([project.to_string(), yes_no(*inherits), lossy(path)]);
        }
        text.push_str(&table.print());
    }
    text.push_str(&skipped_text(&check.skipped));
    if check.disturbed {
        text.push_str(
            "directories were moved during the check, so parts of the tree may be unchecked: run the check again\n",
        );
    }
    text
}

fn skipped_json(skipped: &Skipped) -> impl Serialize {
    let Skipped { hard_links, special_files, mounts, refused, examples } = skipped;
    let example =
        |entry: &SkippedEntry| object! { path: lossy(&entry.path), reason: reason_text(entry.reason) };
    object! {
        hard_links: hard_links,
        special_files: special_files,
        mounts: mounts,
        refused: refused,
        examples: examples.iter().map(example).collect::<Vec<_>>(),
    }
}

/// Returns `true` if only special files were skipped, whose project an old kernel cannot report. They contain no data, and
/// stay in the project of the directory in which they were created.
fn is_minor(skipped: &Skipped) -> bool {
    skipped.hard_links == 0 && skipped.mounts == 0 && skipped.refused == 0
}

fn skipped_text(skipped: &Skipped) -> String {
    let counts = [
        (skipped.hard_links, "files with several hard links"),
        (skipped.special_files, "symbolic links or special files"),
        (skipped.mounts, "mount points"),
        (skipped.refused, "refused by the kernel"),
    ];
    let counts: Vec<String> = counts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    if counts.is_empty() {
        return String::new();
    }
    let mut text = format!("skipped: {}\n", counts.join(", "));
    for SkippedEntry { path, reason } in &skipped.examples {
        text.push_str(&format!("  {}: {}\n", printable(&lossy(path)), reason_text(*reason)));
    }
    text
}

fn reason_text(reason: SkipReason) -> String {
    match reason {
        SkipReason::HardLink => "it has several hard links".to_owned(),
        SkipReason::Mount => "it is a mount point".to_owned(),
        SkipReason::Refused(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
        // The enum is non-exhaustive: later versions of the library may add reasons.
        other => format!("{other:?}"),
    }
}

fn lossy(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ProjectId {
        ProjectId::new(7).unwrap()
    }

    fn left_out() -> Skipped {
        Skipped {
            hard_links: 1,
            special_files: 2,
            refused: 1,
            examples: vec![
                SkippedEntry { path: "a\u{1b}".into(), reason: SkipReason::HardLink },
                SkippedEntry { path: "b".into(), reason: SkipReason::Refused(libc::EPERM) },
            ],
            ..Skipped::default()
        }
    }

    #[test]
    fn tag_prints_its_report_as_text() {
        let report = TreeReport { passes: 2, changed: 3, names: 6, directories: 2, skipped: left_out() };
        assert!(!is_minor(&report.skipped));
        assert_eq!(
            tag_text(id(), &report),
            "\
project 7: 3 changed of 6 names, 2 of them directories
skipped: 1 files with several hard links, 2 symbolic links or special files, 1 refused by the kernel
  a\\u{1b}: it has several hard links
  b: Operation not permitted (os error 1)
"
        );
        let quiet = TreeReport { skipped: Skipped::default(), ..report };
        assert_eq!(tag_text(id(), &quiet), "project 7: 3 changed of 6 names, 2 of them directories\n");
    }

    fn check(skipped: Skipped) -> TreeCheck {
        TreeCheck {
            names: 6,
            directories: 2,
            other_project: 1,
            not_inheriting: 1,
            strays: vec![StrayInode { path: "d/f".into(), project: 9, inherits: false }],
            skipped,
            disturbed: true,
        }
    }

    #[test]
    fn check_prints_strays_as_text() {
        assert_eq!(
            check_text(id(), &check(Skipped::default())),
            "\
project 7: 6 names, 2 of them directories; 1 with another id, 1 directories without project inheritance
ID  INHERITS  PATH
 9  no        d/f
directories were moved during the check, so parts of the tree may be unchecked: run the check again
"
        );
    }

    #[test]
    fn json_fields_stay_unchanged() {
        let report = TreeReport { passes: 2, changed: 3, names: 6, directories: 2, skipped: left_out() };
        let skipped = "\"left_out\":{\"hard_links\":1,\"special_files\":2,\"mounts\":0,\"refused\":1,\"examples\":[{\"path\":\"a\\u001b\",\"reason\":\"it has several hard links\"},\
                       {\"path\":\"b\",\"reason\":\"Operation not permitted (os error 1)\"}]}";
        assert_eq!(
            serde_json::to_string(&tag_json(id(), &report)).unwrap(),
            format!("{{\"id\":7,\"changed\":3,\"passes\":2,\"names\":6,\"directories\":2,{skipped}}}")
        );
        assert_eq!(
            serde_json::to_string(&check_json(id(), &check(left_out()))).unwrap(),
            format!(
                "{{\"id\":7,\"clean\":false,\"complete\":false,\"names\":6,\"directories\":2,\"other_project\":1,\
                 \"not_inheriting\":1,\"strays\":[{{\"path\":\"d/f\",\"id\":9,\"inherits\":false}}],\
                 {skipped},\"disturbed\":true}}"
            )
        );
    }

    #[test]
    fn skipped_files_make_checks_incomplete() {
        let refused = Skipped { refused: 1, ..Skipped::default() };
        let check = TreeCheck { skipped: refused, ..TreeCheck::default() };
        assert!(check.is_clean() && !is_complete(&check));
        // Special files alone do not make a check incomplete, because old kernels cannot report their project.
        let skipped = Skipped { special_files: 1, ..Skipped::default() };
        let check = TreeCheck { skipped, ..TreeCheck::default() };
        assert!(check.is_clean() && is_complete(&check));
    }
}
