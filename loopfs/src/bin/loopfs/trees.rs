//! `quota tag` and `quota audit`: setting and checking the project of the inodes of a tree.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use loopfs::project_quota::ProjectId;
use loopfs::project_tree::{
    HardLinks, SkipReason, Skipped, SpecialFiles, TagOptions, TreeAudit, TreeReport, audit_tree, tag_tree,
};
use serde::Serialize;

use crate::output::{Output, Side, Table, printable};
use crate::project::{open, project_id, project_of_directory};

#[derive(Args, Debug)]
pub(crate) struct Tag {
    /// The root of the tree
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The project, 1 to 4294967294
    #[arg(long, value_parser = project_id)]
    id: ProjectId,
    /// How to treat files with several hard links, some of which may be outside the tree
    #[arg(long, value_enum, default_value_t = HardLinksArg::Skip)]
    hard_links: HardLinksArg,
}

#[derive(Args, Debug)]
pub(crate) struct Audit {
    /// The root of the tree
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The project, 1 to 4294967294. The default is the project of the root
    #[arg(long, value_parser = project_id)]
    id: Option<ProjectId>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum HardLinksArg {
    /// Leave the file in its project and print it
    Skip,
    /// Put the file into the project, under all its names
    Tag,
    /// Fail before changing anything
    Refuse,
}

impl Tag {
    pub(crate) fn run(&self) -> Result<Output> {
        let root = open(&self.directory)?;
        let hard_links = match self.hard_links {
            HardLinksArg::Skip => HardLinks::Skip,
            HardLinksArg::Tag => HardLinks::Tag,
            HardLinksArg::Refuse => HardLinks::Refuse,
        };
        let options = TagOptions { hard_links, ..TagOptions::default() };
        let report = tag_tree(root.as_fd(), self.id, &options).with_context(|| shown(&self.directory))?;
        // Without this, a power cut could restore the old ids.
        nix::unistd::syncfs(&root).with_context(|| format!("sync {}", self.directory.display()))?;
        let tagged = Tagged::of(self.id, &report);
        Ok(Output::new(tagged.text(), &tagged)?.good(tagged.left_out.is_minor()))
    }
}

impl Audit {
    pub(crate) fn run(&self) -> Result<Output> {
        let root = open(&self.directory)?;
        let id = match self.id {
            Some(id) => id,
            None => project_of_directory(&root, &self.directory)?,
        };
        let audit = audit_tree(root.as_fd(), id).with_context(|| shown(&self.directory))?;
        let audited = Audited::of(id, &audit);
        Ok(Output::new(audited.text(), &audited)?.good(audited.clean && audited.complete))
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[derive(Debug, Serialize)]
struct Tagged {
    id: u32,
    changed: u64,
    passes: u32,
    names: u64,
    directories: u64,
    left_out: SkippedInTree,
}

#[derive(Debug, Serialize)]
struct Audited {
    id: u32,
    /// `true` if every inode that could be checked is in the project.
    clean: bool,
    /// `true` if the audit checked every inode that can leave the project.
    complete: bool,
    names: u64,
    directories: u64,
    other_project: u64,
    not_inheriting: u64,
    /// The first 16 inodes that are not in the project or do not inherit it.
    strays: Vec<Stray>,
    left_out: SkippedInTree,
    disturbed: bool,
}

#[derive(Debug, Serialize)]
struct Stray {
    path: String,
    id: u32,
    inherits: bool,
}

#[derive(Debug, Serialize)]
struct SkippedInTree {
    hard_links: u64,
    symlinks: u64,
    sockets: u64,
    fifos: u64,
    devices: u64,
    mounts: u64,
    refused: u64,
    /// The first 16 skipped entries, without the special files.
    examples: Vec<Example>,
}

#[derive(Debug, Serialize)]
struct Example {
    path: String,
    reason: String,
}

impl SkippedInTree {
    fn of(skipped: &Skipped) -> Self {
        let Skipped { hard_links, special_files, mounts, refused, examples } = skipped;
        let SpecialFiles { symlinks, sockets, fifos, devices } = *special_files;
        let example = |path: &Path, reason: SkipReason| Example {
            path: path.to_string_lossy().into_owned(),
            reason: reason_text(reason),
        };
        Self {
            hard_links: *hard_links,
            symlinks,
            sockets,
            fifos,
            devices,
            mounts: *mounts,
            refused: *refused,
            examples: examples.iter().map(|inode| example(&inode.path, inode.reason)).collect(),
        }
    }

    /// Returns `true` if only special files were skipped, whose project an old kernel cannot report. They contain no data, and
    /// stay in the project of the directory in which they were created.
    fn is_minor(&self) -> bool {
        self.hard_links == 0 && self.mounts == 0 && self.refused == 0
    }

    fn text(&self) -> String {
        let counts = [
            (self.hard_links, "files with further names"),
            (self.symlinks, "symbolic links"),
            (self.sockets, "sockets"),
            (self.fifos, "FIFOs"),
            (self.devices, "devices"),
            (self.mounts, "mount points"),
            (self.refused, "refused by the kernel"),
        ];
        let counts: Vec<String> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if counts.is_empty() {
            return String::new();
        }
        let mut text = format!("left out: {}\n", counts.join(", "));
        for Example { path, reason } in &self.examples {
            text.push_str(&format!("  {}: {reason}\n", printable(path)));
        }
        text
    }
}

fn reason_text(reason: SkipReason) -> String {
    match reason {
        SkipReason::HardLink => "it has further names".to_owned(),
        SkipReason::Mount => "something is mounted there".to_owned(),
        SkipReason::Refused(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
        // The enum is non-exhaustive: later versions of the library may add reasons.
        other => format!("{other:?}"),
    }
}

impl Tagged {
    fn of(id: ProjectId, report: &TreeReport) -> Self {
        let TreeReport { passes, changed, names, directories, skipped } = report;
        Self {
            id: id.get(),
            changed: *changed,
            passes: *passes,
            names: *names,
            directories: *directories,
            left_out: SkippedInTree::of(skipped),
        }
    }

    fn text(&self) -> String {
        format!(
            "project {}: {} changed of {} names, {} of them directories\n{}",
            self.id,
            self.changed,
            self.names,
            self.directories,
            self.left_out.text()
        )
    }
}

impl Audited {
    fn of(id: ProjectId, audit: &TreeAudit) -> Self {
        let stray = |path: &Path, id: u32, inherits: bool| Stray {
            path: path.to_string_lossy().into_owned(),
            id,
            inherits,
        };
        let left_out = SkippedInTree::of(&audit.skipped);
        Self {
            id: id.get(),
            clean: audit.is_clean(),
            complete: left_out.is_minor() && !audit.disturbed,
            names: audit.names,
            directories: audit.directories,
            other_project: audit.other_project,
            not_inheriting: audit.not_inheriting,
            strays: audit
                .strays
                .iter()
                .map(|found| stray(&found.path, found.project, found.inherits))
                .collect(),
            left_out,
            disturbed: audit.disturbed,
        }
    }

    fn text(&self) -> String {
        let mut text = format!(
            "project {}: {} names, {} of them directories; {} with another id, {} directories that hand none down\n",
            self.id, self.names, self.directories, self.other_project, self.not_inheriting
        );
        if !self.strays.is_empty() {
            let mut table = Table::new([("ID", Side::Right), ("INHERITS", Side::Left), ("PATH", Side::Left)]);
            for Stray { path, id, inherits } in &self.strays {
                table.row([id.to_string(), crate::output::yes_no(*inherits), path.clone()]);
            }
            text.push_str(&table.print());
        }
        text.push_str(&self.left_out.text());
        if self.disturbed {
            text.push_str("directories were moved in the meantime: parts of the tree may not have been seen; audit it again\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use loopfs::project_tree::{SkippedEntry, StrayInode};

    use super::*;

    fn id() -> ProjectId {
        ProjectId::new(7).unwrap()
    }

    fn left_out() -> Skipped {
        Skipped {
            hard_links: 1,
            special_files: SpecialFiles { symlinks: 2, ..SpecialFiles::default() },
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
        let tagged = Tagged::of(id(), &report);
        assert!(!tagged.left_out.is_minor());
        assert_eq!(
            tagged.text(),
            "\
project 7: 3 changed of 6 names, 2 of them directories
left out: 1 files with further names, 2 symbolic links, 1 refused by the kernel
  a\\u{1b}: it has further names
  b: Operation not permitted (os error 1)
"
        );
        let quiet = Tagged::of(id(), &TreeReport { skipped: Skipped::default(), ..report });
        assert_eq!(quiet.text(), "project 7: 3 changed of 6 names, 2 of them directories\n");
    }

    #[test]
    fn audit_prints_its_report_as_text_and_json() {
        let audit = TreeAudit {
            names: 6,
            directories: 2,
            other_project: 1,
            not_inheriting: 1,
            strays: vec![StrayInode { path: "d/f".into(), project: 9, inherits: false }],
            disturbed: true,
            ..TreeAudit::default()
        };
        let audited = Audited::of(id(), &audit);
        assert_eq!(
            audited.text(),
            "\
project 7: 6 names, 2 of them directories; 1 with another id, 1 directories that hand none down
ID  INHERITS  PATH
 9  no        d/f
directories were moved in the meantime: parts of the tree may not have been seen; audit it again
"
        );
        assert_eq!(
            serde_json::to_value(&audited).unwrap(),
            serde_json::json!({
                "id": 7,
                "clean": false,
                "complete": false,
                "names": 6,
                "directories": 2,
                "other_project": 1,
                "not_inheriting": 1,
                "strays": [{ "path": "d/f", "id": 9, "inherits": false }],
                "left_out": {
                    "hard_links": 0, "symlinks": 0, "sockets": 0, "fifos": 0, "devices": 0, "mounts": 0, "refused": 0,
                    "examples": [],
                },
                "disturbed": true,
            })
        );
    }

    #[test]
    fn an_audit_with_skipped_files_is_not_complete() {
        let refused = Skipped { refused: 1, ..Skipped::default() };
        let audited = Audited::of(id(), &TreeAudit { skipped: refused, ..TreeAudit::default() });
        assert!(audited.clean && !audited.complete);
        // Special files alone do not make an audit incomplete, because old kernels cannot report their project.
        let special = SpecialFiles { symlinks: 1, ..SpecialFiles::default() };
        let skipped = Skipped { special_files: special, ..Skipped::default() };
        let audited = Audited::of(id(), &TreeAudit { skipped, ..TreeAudit::default() });
        assert!(audited.clean && audited.complete);
    }
}
