//! `loopfs data-dir`: the disk of the volumes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use loopfs::project_quota::Enforcement;
use serde::Serialize;

use crate::data_disk::{self, BlankDisk, DataDisk, DataMount, DiskSource, Mounted, Problem, Superblock};
use crate::output::{Output, object, yes_no};
use crate::size;

/// The label of a new file system if none is given.
const LABEL: &str = "loopfs";
/// The directories of administrators' programs, which the `PATH` of a service may lack.
const SYSTEM_DIRECTORIES: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];
/// Features that volumes need. Everything else is as the installed xfsprogs has it, which fits the kernel of its
/// distribution.
const FEATURES: [&str; 4] = ["-m", "crc=1,finobt=1,reflink=1", "-n", "ftype=1"];

/// The rule of udev and the filter of LVM, and the files that they belong to.
const UDEV_RULE: (&str, &str) =
    ("/etc/udev/rules.d/59-loopfs.rules", include_str!("../../examples/udev/59-loopfs.rules"));
const LVM_FILTER: (&str, &str) =
    ("/etc/lvm/lvmlocal.conf", include_str!("../../examples/lvm/global_filter.conf"));

#[derive(Debug, Subcommand)]
pub(crate) enum DataDirCommand {
    Check(CheckDisk),
    Mount(MountDisk),
    Format(FormatDisk),
    /// Print the rule that keeps udev from reading what the owners of Block volumes write
    ///
    /// Without it, LVM and mdadm activate what they find on the loop devices, and keep these for good. Write it to
    /// /etc/udev/rules.d/59-loopfs.rules, and run `udevadm control --reload`.
    ///
    /// JSON: {"file", "text"}
    #[command(verbatim_doc_comment)]
    UdevRule,
    /// Print the filter that keeps the commands of LVM from reading what the owners of Block volumes write
    ///
    /// Append it to /etc/lvm/lvmlocal.conf. It replaces a global_filter of lvm.conf.
    ///
    /// JSON: {"file", "text"}
    #[command(verbatim_doc_comment)]
    LvmFilter,
}

/// Print what is on a disk or mounted at a directory, and each problem with its remedy
///
/// The command changes nothing and does not replay the log. The exit code is 0 if there is no problem, and 1 if there is one.
/// Missing bigtime and a disk that is larger than its file system are no problems.
///
/// JSON: {"device", "number", "size_bytes", "read_only", "zero_edges", "filesystem": {"type", "uuid", "label", "size_bytes",
/// "crc", "reflink", "ftype", "bigtime", "incomplete", "damaged"} | null, "mounts": [{"directory", "options": [..], "quota":
/// "enforcing" | "accounting_only" | "off" | "no_syscall" | null}], "problems": [{"problem", "remedy"}]}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct CheckDisk {
    /// A device, UUID=..., or the directory at which the disk is mounted
    #[arg(value_name = "DEVICE|DIRECTORY")]
    target: OsString,
}

/// Mount the XFS of a disk with prjquota, nodev, nosuid and noexec, and expand it if the disk has grown
///
/// If the disk is already mounted there with these options, the command only expands it. It never formats a disk. It refuses
/// a disk without XFS, a read-only one, and a file system that needs xfs_repair. If only the expansion fails, the exit code
/// is 1, and the disk stays mounted.
///
/// UUID= needs no udev: the command reads all disks, except loop devices, devices built on them, and members of a RAID or
/// volume group. If two disks have the UUID, the command refuses both.
///
/// JSON: {"device", "directory", "uuid", "already_mounted", "growth": {"from_bytes", "to_bytes"} | null}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct MountDisk {
    /// A device, or UUID=...
    #[arg(value_name = "DEVICE|UUID=")]
    source: OsString,
    /// The mount point, an existing directory
    directory: PathBuf,
}

/// Create an XFS on an empty disk with mkfs.xfs
///
/// The first and last 4 MiB of the disk must be zeros: the signatures of file systems, partition tables, RAIDs and volume managers
/// lie there. Disks in use and disks below 300 MiB are refused, too. There is no option to format a disk that is not empty: the
/// message names the commands that erase it.
///
/// If mkfs.xfs is interrupted, the next run refuses the disk and says so.
///
/// JSON: as of `check`, after the format
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct FormatDisk {
    /// The disk, a partition or a logical volume
    device: PathBuf,
    /// Confirm that the disk may be formatted
    #[arg(long, required = true)]
    yes_format_this_disk: bool,
    /// The label of the file system: 1 to 12 letters, digits, `.`, `_` or `-`
    #[arg(long, default_value = LABEL, value_parser = label)]
    label: String,
}

/// Parses a label that needs no quoting in a shell, in fstab(5) and in the links of udev.
fn label(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let good = (1..=12).contains(&text.len()) && !text.starts_with('-') && text.bytes().all(allowed);
    if good { Ok(text.to_owned()) } else { Err("write 1 to 12 letters, digits, `.`, `_` or `-`".to_owned()) }
}

impl DataDirCommand {
    pub(crate) fn run(&self) -> Result<Output> {
        match self {
            Self::Check(check) => check.run(),
            Self::Mount(mount) => mount.run(),
            Self::Format(format) => format.run(),
            Self::UdevRule => configuration(UDEV_RULE),
            Self::LvmFilter => configuration(LVM_FILTER),
        }
    }
}

fn configuration((file, text): (&str, &str)) -> Result<Output> {
    Ok(Output::new(text.to_owned(), &object! { file: file, text: text })?)
}

impl CheckDisk {
    fn run(&self) -> Result<Output> {
        let source = DiskSource::parse(&self.target)?;
        let disk = match &source {
            DiskSource::Path(path) if path.is_dir() => DataDisk::check_mounted(path)?,
            _ => DataDisk::check(&source)?,
        };
        report(&disk)
    }
}

impl MountDisk {
    fn run(&self) -> Result<Output> {
        let mounted = data_disk::mount(&DiskSource::parse(&self.source)?, &self.directory)?;
        Ok(Output::new(mounted_text(&mounted), &mounted_json(&mounted))?)
    }
}

impl FormatDisk {
    fn run(&self) -> Result<Output> {
        let BlankDisk { device, lock } = BlankDisk::claim(&self.device)?;
        let (program, path) = (mkfs()?, device.path);
        drop(device.file);
        run_mkfs(&program, &path, &self.label)?;
        let formatted = DataDisk::check(&DiskSource::Path(path.clone()))?;
        let label = formatted.filesystem.as_ref().map(|filesystem| filesystem.label.as_str());
        if label != Some(self.label.as_str()) {
            bail!(
                "format {}: mkfs.xfs reported success, but the disk has no XFS with this label",
                path.display()
            );
        }
        // From here on udev may read the device.
        drop(lock);
        report(&formatted)
    }
}

/// Returns the path of mkfs.xfs.
fn mkfs() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(SYSTEM_DIRECTORIES.map(PathBuf::from));
    directories
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join("mkfs.xfs"))
        .find(|program| program.is_file())
        .context("find mkfs.xfs: it is in no directory of PATH; install the package xfsprogs")
}

/// Runs mkfs.xfs and waits for it. Without `-f` it refuses a device that has anything on it by now.
fn run_mkfs(program: &Path, device: &Path, label: &str) -> Result<()> {
    let output = Command::new(program)
        .args(["-q", "-L", label])
        .args(FEATURES)
        .arg("--")
        .arg(device)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {}", program.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    bail!("format {}: mkfs.xfs failed ({}): {}", device.display(), output.status, said.join("; "))
}

fn report(disk: &DataDisk) -> Result<Output> {
    let problems = disk.problems();
    let good = problems.is_empty();
    Ok(Output::new(text(disk, &problems), &disk_json(disk, &problems))?.good(good))
}

fn text(disk: &DataDisk, problems: &[Problem]) -> String {
    let mut lines = vec![format!(
        "device      {}, {}{}",
        disk.device.display(),
        size::show(disk.size.0),
        if disk.read_only { ", read-only" } else { "" }
    )];
    match &disk.filesystem {
        Some(filesystem) => lines.extend(filesystem_lines(filesystem)),
        None => lines.push(format!(
            "content     {}",
            if disk.zero_edges { "zeros in the first and last 4 MiB" } else { "no XFS" }
        )),
    }
    if disk.mounts.is_empty() {
        lines.push("mounted     no".to_owned());
    }
    for mount in &disk.mounts {
        lines.push(format!("mounted     at {} ({})", mount.directory.display(), mount.options.join(",")));
        lines.push(format!("quota       {}", mount.quota.map_or("unknown", quota_text)));
    }
    lines.extend(problems.iter().map(|problem| format!("problem     {problem}")));
    let lines: Vec<String> = lines.iter().map(|line| crate::output::printable(line)).collect();
    lines.join("\n")
}

fn filesystem_lines(filesystem: &Superblock) -> [String; 3] {
    let features = filesystem.features;
    let label = if filesystem.label.is_empty() { "no label" } else { &filesystem.label };
    [
        format!("content     XFS, label {label}, UUID {}", filesystem.uuid),
        format!("size        {}", size::show(filesystem.size().0)),
        format!(
            "features    crc {}, reflink {}, ftype {}, bigtime {}",
            yes_no(features.crc),
            yes_no(features.reflink),
            yes_no(features.ftype),
            yes_no(features.bigtime)
        ),
    ]
}

fn quota_text(quota: Enforcement) -> &'static str {
    match quota {
        Enforcement::Enforcing => "project limits are enforced",
        Enforcement::AccountingOnly => "usage is counted, limits are not enforced",
        Enforcement::NoQuota => "off",
        Enforcement::NoSyscall => "unknown: the kernel has no quotactl_fd",
    }
}

fn mounted_text(mounted: &Mounted) -> String {
    let (device, directory) = (mounted.device.display(), mounted.directory.display());
    let mut text = match mounted.already_mounted {
        true => format!("{device} is already mounted at {directory}\n"),
        false => format!("mounted {device} at {directory}\n"),
    };
    if let Some((from, to)) = mounted.growth {
        let (from, to) = (size::show(from.0), size::show(to.0));
        text.push_str(&format!("expanded the file system from {from} to {to}\n"));
    }
    text
}

fn disk_json(disk: &DataDisk, problems: &[Problem]) -> impl Serialize {
    object! {
        device: disk.device.to_string_lossy(),
        number: disk.number.to_string(),
        size_bytes: disk.size.0,
        read_only: disk.read_only,
        zero_edges: disk.zero_edges,
        filesystem: disk.filesystem.as_ref().map(filesystem_json),
        mounts: disk.mounts.iter().map(mount_json).collect::<Vec<_>>(),
        problems: problems,
    }
}

fn filesystem_json(filesystem: &Superblock) -> impl Serialize {
    let features = filesystem.features;
    object! {
        r#type: "xfs",
        uuid: filesystem.uuid.to_string(),
        label: &filesystem.label,
        size_bytes: filesystem.size().0,
        crc: features.crc,
        reflink: features.reflink,
        ftype: features.ftype,
        bigtime: features.bigtime,
        incomplete: filesystem.in_progress,
        damaged: filesystem.is_damaged(),
    }
}

fn mount_json(mount: &DataMount) -> impl Serialize {
    let quota = mount.quota.map(|quota| match quota {
        Enforcement::Enforcing => "enforcing",
        Enforcement::AccountingOnly => "accounting_only",
        Enforcement::NoQuota => "off",
        Enforcement::NoSyscall => "no_syscall",
    });
    object! { directory: mount.directory.to_string_lossy(), options: &mount.options, quota: quota }
}

fn mounted_json(mounted: &Mounted) -> impl Serialize {
    object! {
        device: mounted.device.to_string_lossy(),
        directory: mounted.directory.to_string_lossy(),
        uuid: mounted.uuid.to_string(),
        already_mounted: mounted.already_mounted,
        growth: mounted.growth.map(|(from, to)| object! { from_bytes: from.0, to_bytes: to.0 }),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("loopfs", true)]
    #[case("a.b_c-12", true)]
    #[case("twelve-bytes", true)]
    #[case("thirteen-byte", false)]
    #[case("", false)]
    #[case("-f", false)]
    #[case("a b", false)]
    #[case("a/b", false)]
    #[case("ä", false)]
    #[case("a\nb", false)]
    fn labels_are_parsed_or_rejected(#[case] text: &str, #[case] good: bool) {
        assert_eq!(label(text).is_ok(), good);
    }

    #[test]
    fn a_failed_mkfs_shows_its_message() {
        let directory = tempfile::tempdir().unwrap();
        let device = directory.path().join("no-device");
        let error = run_mkfs(Path::new("/bin/false"), &device, LABEL).unwrap_err().to_string();
        assert!(error.contains("mkfs.xfs failed") && error.contains("no-device"), "{error}");
        assert!(
            run_mkfs(&directory.path().join("absent"), &device, LABEL)
                .unwrap_err()
                .to_string()
                .contains("absent")
        );
    }
}
