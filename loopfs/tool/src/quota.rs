//! `quota show`, `set` and `list`: the usage and limits of projects.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use loopfs::project_quota::{Enforcement, Limit, Limits, ProjectId, ProjectQuota, StoredLimits, Usage};
use loopfs::{Bytes, Inodes};
use serde::Serialize;

use crate::output::{Output, Side, Table, counted};
use crate::project::{open, project_id, project_or_own, sync};
use crate::size::{self, nonzero, nonzero_number};
use crate::trees::{CheckTree, LimitDirectory, Tag, UnlimitDirectory};

#[derive(Debug, Subcommand)]
pub(crate) enum QuotaCommand {
    /// Show the usage and limits of a project
    ///
    /// Soft limits that other programs have set are not shown.
    ///
    /// JSON: {id, enforced, bytes: {used, hard}, inodes: {the same}}
    #[command(verbatim_doc_comment)]
    Show(ProjectArgs),
    /// Limit a directory
    ///
    /// Puts the directory and its content into a project of its own, with an id from 1291845632 to 1308622847. Repeat the
    /// command to change the limits. A directory inside of a limited one is refused. Output and exit code are those of `loopfs
    /// quota tag`.
    #[command(verbatim_doc_comment)]
    Limit(LimitDirectory),
    /// Remove the limit that `loopfs quota limit` has set
    ///
    /// The exit code is 1 if files are still charged to the project: deleted ones that a process has open, or ones outside
    /// of the directory. A later `loopfs quota limit` frees its id.
    ///
    /// JSON: {bytes, inodes}, which are still charged
    #[command(verbatim_doc_comment)]
    Unlimit(UnlimitDirectory),
    /// Set the limits of a project, read them back and show them
    ///
    /// Limits without an option stay unchanged. XFS rounds bytes up to its blocks. A limit below the current usage only
    /// prevents further growth. Ids from 1275068416 to 1291845631 belong to volume stores, which set their limits to the
    /// sizes of the volumes. Do not change these.
    ///
    /// JSON: the same as for `loopfs quota show`.
    #[command(verbatim_doc_comment)]
    Set(Set),
    /// Show every project that has usage or limits
    ///
    /// JSON: {enforced, projects: [the same as for `loopfs quota show`]}
    #[command(verbatim_doc_comment)]
    List(ListProjects),
    /// Put a directory and its content into a project
    ///
    /// New entries of the directory inherit the project. The exit code is 1 if the command skipped entries: files with
    /// several hard links (see --hard-links), mount points, and entries that the kernel refused to change. Symbolic
    /// links, sockets, FIFOs and devices can only be tagged from Linux 6.17 on. Before, the command only counts them.
    /// The command can be repeated.
    ///
    /// JSON: {id, changed, passes, names, directories, left_out: {hard_links, special_files, mounts, refused,
    /// examples: [{path, reason}]}}
    #[command(verbatim_doc_comment, visible_alias = "assign")]
    Tag(Tag),
    /// Find files in a directory that are not in its project
    ///
    /// The owner of a file can change its project id and thereby evade the limit. The command changes nothing. The exit
    /// code is 1 if it found such files or could not check parts of the tree.
    ///
    /// JSON: {id, clean, complete, names, directories, other_project, not_inheriting, strays: [{path, id, inherits}],
    /// left_out: the same as for `loopfs quota tag`, disturbed}. strays and examples contain the first 16.
    #[command(verbatim_doc_comment)]
    Check(CheckTree),
}

/// The arguments that select a project.
#[derive(Args, Debug)]
pub(crate) struct ProjectArgs {
    /// A directory in the project, or any directory of the file system if --id is given
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The project, 1 to 4294967294. The default is the project of the directory
    #[arg(long, value_parser = project_id)]
    id: Option<ProjectId>,
}

#[derive(Args, Debug)]
#[group(id = "limits", multiple = true, required = true, args = ["bytes", "inodes"])]
pub(crate) struct Set {
    #[command(flatten)]
    project: ProjectArgs,
    /// The limit of its disk usage: a size, or `unlimited`
    #[arg(long, value_name = "LIMIT", value_parser = byte_limit)]
    bytes: Option<Limit<Bytes>>,
    /// The limit of its inodes: a number, or `unlimited`
    #[arg(long, value_name = "LIMIT", value_parser = inode_limit)]
    inodes: Option<Limit<Inodes>>,
}

#[derive(Args, Debug)]
pub(crate) struct ListProjects {
    /// Any directory of the file system
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

fn or_unlimited(error: String) -> String {
    format!("{error}; or write `unlimited`")
}

fn byte_limit(text: &str) -> Result<Limit<Bytes>, String> {
    match text {
        "unlimited" => Ok(Limit::Unlimited),
        text => nonzero(text).map(|bytes| Limit::Hard(Bytes(bytes))).map_err(or_unlimited),
    }
}

fn inode_limit(text: &str) -> Result<Limit<Inodes>, String> {
    match text {
        "unlimited" => Ok(Limit::Unlimited),
        text => nonzero_number(text).map(|inodes| Limit::Hard(Inodes(inodes))).map_err(or_unlimited),
    }
}

impl QuotaCommand {
    pub(crate) fn run(&self) -> Result<Output> {
        match self {
            Self::Show(project) => {
                let (directory, id, enforced) = project.open()?;
                project_output(id, ProjectQuota::of(directory.as_fd()).usage(id)?, enforced)
            }
            Self::Limit(limit) => limit.run(),
            Self::Unlimit(unlimit) => unlimit.run(),
            Self::Set(set) => set.run(),
            Self::List(list) => list.run(),
            Self::Tag(tag) => tag.run(),
            Self::Check(check) => check.run(),
        }
    }
}

impl Set {
    fn run(&self) -> Result<Output> {
        let (directory, id, enforced) = self.project.open()?;
        let quota = ProjectQuota::of(directory.as_fd());
        quota.set_limits(id, self.limits())?;
        sync(&directory, &self.project.directory)?;
        project_output(id, quota.usage(id)?, enforced)
    }

    fn limits(&self) -> Limits {
        Limits { bytes: self.bytes.unwrap_or_default(), inodes: self.inodes.unwrap_or_default() }
    }
}

impl ListProjects {
    fn run(&self) -> Result<Output> {
        let (directory, enforced) = open_with_quota(&self.directory)?;
        let quota = ProjectQuota::of(directory.as_fd());
        let usages: Vec<Usage> =
            quota.ids(ProjectId::FIRST..=ProjectId::LAST).collect::<loopfs::Result<_>>()?;
        let listing = QuotaListing {
            enforced,
            projects: usages.iter().map(|usage| ProjectRow::of(usage, enforced)).collect(),
        };
        Ok(Output::new(listing.text(), &listing)?)
    }
}

impl ProjectArgs {
    /// Returns the directory, the project, and `true` if its limits are enforced.
    fn open(&self) -> Result<(File, ProjectId, bool)> {
        let (directory, enforced) = open_with_quota(&self.directory)?;
        let id = project_or_own(self.id, &directory, &self.directory)?;
        Ok((directory, id, enforced))
    }
}

/// Opens a directory. Returns it, and `true` if its file system enforces limits. Fails if the file system has no project
/// quotas.
fn open_with_quota(path: &Path) -> Result<(File, bool)> {
    let directory = open(path)?;
    let quota = ProjectQuota::of(directory.as_fd());
    let enforced = match quota.enforcement() {
        Ok(Enforcement::AccountingOnly) => Ok(false),
        _ => quota.require_enforcing().map(|()| true),
    };
    let enforced = enforced.with_context(|| path.display().to_string())?;
    Ok((directory, enforced))
}

fn project_output(id: ProjectId, usage: Option<Usage>, enforced: bool) -> Result<Output> {
    // XFS has no quota record for an id without usage and limits.
    let unused = Usage { id, bytes: Bytes(0), inodes: Inodes(0), limits: StoredLimits::UNLIMITED };
    let usage = usage.unwrap_or(unused);
    let project = ProjectRow::of(&usage, enforced);
    Ok(Output::new(project.text(), &project)?)
}

#[derive(Debug, Serialize)]
struct QuotaListing {
    enforced: bool,
    projects: Vec<ProjectRow>,
}

/// A project in JSON.
#[derive(Debug, Serialize)]
struct ProjectRow {
    id: u32,
    enforced: bool,
    bytes: ResourceUsage,
    inodes: ResourceUsage,
}

#[derive(Debug, Serialize)]
struct ResourceUsage {
    used: u64,
    hard: Option<u64>,
}

impl ResourceUsage {
    /// Returns the cells USED and HARD of a table.
    fn cells(&self, show: fn(u64) -> String) -> [String; 2] {
        [show(self.used), self.hard.map(show).unwrap_or_default()]
    }
}

impl ProjectRow {
    fn of(usage: &Usage, enforced: bool) -> Self {
        Self {
            id: usage.id.get(),
            enforced,
            bytes: ResourceUsage { used: usage.bytes.0, hard: usage.limits.bytes.map(|bytes| bytes.0) },
            inodes: ResourceUsage { used: usage.inodes.0, hard: usage.limits.inodes.map(|inodes| inodes.0) },
        }
    }

    fn text(&self) -> String {
        let mut table = Table::new([("", Side::Left), ("USED", Side::Right), ("HARD", Side::Right)]);
        let Self { id, enforced, bytes, inodes } = self;
        for (name, cells) in [("bytes", bytes.cells(size::show)), ("inodes", inodes.cells(number))] {
            let [used, hard] = cells;
            table.row([name.to_owned(), used, hard]);
        }
        format!("project {id}{}\n{}", not_enforced(*enforced), table.print())
    }
}

impl QuotaListing {
    fn text(&self) -> String {
        let columns = ["ID", "BYTES", "HARD", "INODES", "HARD"];
        let mut table = Table::new(columns.map(|column| (column, Side::Right)));
        for ProjectRow { id, enforced: _, bytes, inodes } in &self.projects {
            let ([bytes, most_bytes], [inodes, most_inodes]) =
                (bytes.cells(size::show), inodes.cells(number));
            table.row([id.to_string(), bytes, most_bytes, inodes, most_inodes]);
        }
        let projects = counted(self.projects.len(), "project");
        format!("{}{projects}{}\n", table.print(), not_enforced(self.enforced))
    }
}

fn number(number: u64) -> String {
    number.to_string()
}

fn not_enforced(enforced: bool) -> &'static str {
    if enforced {
        ""
    } else {
        "; limits are not enforced, because the mount option is pqnoenforce; usage is only counted"
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rstest::rstest;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn usage(id: u32) -> Usage {
        Usage {
            id: ProjectId::new(id).unwrap(),
            bytes: Bytes(12_288),
            inodes: Inodes(3),
            limits: StoredLimits { bytes: Some(Bytes(MIB)), inodes: Some(Inodes(100)) },
        }
    }

    #[test]
    fn show_prints_a_project_as_text() {
        assert_eq!(
            ProjectRow::of(&usage(7), false).text(),
            "\
project 7; limits are not enforced, because the mount option is pqnoenforce; usage is only counted
         USED  HARD
bytes   12KiB  1MiB
inodes      3   100
"
        );
    }

    #[test]
    fn list_prints_projects_as_a_table() {
        let unlimited = Usage { limits: StoredLimits::UNLIMITED, ..usage(u32::MAX - 1) };
        let listing = QuotaListing {
            enforced: true,
            projects: [usage(7), unlimited].map(|usage| ProjectRow::of(&usage, true)).into(),
        };
        assert_eq!(
            listing.text(),
            "        ID  BYTES  HARD  INODES  HARD
         7  12KiB  1MiB       3   100
4294967294  12KiB     -       3     -
2 projects
"
        );
    }

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        set: Set,
    }

    fn limits(args: &[&str]) -> Option<Limits> {
        let line = Line::try_parse_from(["set", "/d"].iter().chain(args)).ok()?;
        Some(line.set.limits())
    }

    #[rstest]
    #[case::one_alone(&["--bytes=1MiB"], Limits { bytes: Limit::Hard(Bytes(MIB)), ..Limits::KEEP })]
    #[case::neither(&["--bytes=unlimited", "--inodes=unlimited"], Limits::UNLIMITED)]
    #[case::both(
        &["--bytes=2MiB", "--inodes=5"],
        Limits { bytes: Limit::Hard(Bytes(2 * MIB)), inodes: Limit::Hard(Inodes(5)) }
    )]
    fn valid_limits_are_parsed(#[case] args: &[&str], #[case] expected: Limits) {
        assert_eq!(limits(args), Some(expected));
    }

    #[rstest]
    #[case::nothing(&[])]
    #[case::zero(&["--bytes=0"])]
    #[case::no_inodes(&["--inodes=0"])]
    #[case::unit_of_inodes(&["--inodes=4KiB"])]
    #[case::sign(&["--inodes=+4"])]
    fn invalid_limits_are_rejected(#[case] args: &[&str]) {
        assert_eq!(limits(args), None);
    }

    #[rstest]
    #[case("1", Some(1))]
    #[case("4294967294", Some(u32::MAX - 1))]
    #[case("0", None)]
    #[case("4294967295", None)]
    #[case("4294967296", None)]
    #[case("-1", None)]
    #[case("+1", None)]
    #[case("", None)]
    fn project_ids_are_parsed_or_rejected(#[case] text: &str, #[case] expected: Option<u32>) {
        assert_eq!(project_id(text).ok().map(ProjectId::get), expected);
    }
}
