//! The check of a data disk: the facts, and the problems that follow from them.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use loopfs::mount::table::{self as mountinfo, Mount};
use loopfs::project_quota::{Enforcement, ProjectQuota};
use loopfs::xfs::{self, Features};
use loopfs::{Bytes, DeviceNumber};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
use serde::Serialize;

use super::block_device::BlockDevice;
use super::edges::{EDGE, Edges, Signature};
use super::source::DiskSource;
use super::superblock::Superblock;
use crate::shell::quoted;

const OPERATION: &str = "check the data disk";

/// The flags of the mount of a data disk, in this order in messages.
pub(crate) const MOUNT_FLAGS: [&str; 3] = ["nodev", "nosuid", "noexec"];

/// A data disk: a device, what is on it, and where that is mounted.
#[derive(Clone, Debug)]
pub(crate) struct DataDisk {
    /// The path of the device, without symbolic links.
    pub(crate) device: PathBuf,
    pub(crate) number: DeviceNumber,
    /// The size of the device.
    pub(crate) size: Bytes,
    pub(crate) read_only: bool,
    /// The first and the last 4 MiB of the device are zeros.
    pub(crate) zero_edges: bool,
    /// The superblock of the XFS on it, or `None` if it has none.
    pub(crate) filesystem: Option<Superblock>,
    /// The signatures behind the XFS, such as those of a RAID with its metadata at the end. An expansion would overwrite them.
    pub(crate) signatures_behind: Vec<Signature>,
    /// Where the root of the XFS is mounted in the mount namespace of this process.
    pub(crate) mounts: Vec<DataMount>,
}

/// A mount of a data disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataMount {
    pub(crate) directory: PathBuf,
    /// The options of the mount and of the file system, as in `/proc/self/mountinfo`.
    pub(crate) options: Vec<String>,
    /// How the kernel treats project limits, as quotactl_fd(2) returns it. `None` if the mount point cannot be opened, or
    /// another mount covers it.
    pub(crate) quota: Option<Enforcement>,
}

/// A reason why a disk cannot be used for volumes, or not for all of their features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    pub(crate) problem: String,
    pub(crate) remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.problem, self.remedy)
    }
}

impl DataDisk {
    /// Reads what is on a disk and where it is mounted. Changes nothing, and does not replay the log.
    pub(crate) fn check(source: &DiskSource) -> Result<Self> {
        Self::of_device(&source.open(OPERATION)?)
    }

    /// Reads what is mounted at a directory.
    pub(crate) fn check_mounted(directory: &Path) -> Result<Self> {
        let shown = directory.display();
        let root = File::open(directory).with_context(|| format!("{OPERATION} {shown}"))?;
        let mounts = mountinfo::read()?;
        let mount = mountinfo::holding(&mounts, &root);
        let Some(mount) = mount.filter(|_| is_mount_root(&root).unwrap_or_default()) else {
            bail!(
                "{OPERATION} {shown}: nothing is mounted there; mount the disk with `loopfs data-dir mount`, or give its device"
            );
        };
        if mount.device.major == 0 {
            bail!(
                "{OPERATION} {shown}: the file system there is {} without a block device of its own; volumes need XFS on a disk",
                mount.fs_type
            );
        }
        Self::of_device(&BlockDevice::of_number(mount.device, OPERATION)?)
    }

    pub(crate) fn of_device(device: &BlockDevice) -> Result<Self> {
        let shown = || format!("{OPERATION} {}", device.path.display());
        let edges = Edges::read(&device.file, device.size.0).with_context(shown)?;
        let superblock = device.superblock().with_context(shown)?;
        let mounts: Vec<DataMount> = mountinfo::read()?
            .iter()
            .filter(|mount| mount.device == device.number && mount.root == Path::new("/"))
            .map(DataMount::of)
            .collect();
        let filesystem = superblock.map(|superblock| with_mounted_size(superblock, &mounts));
        let end = filesystem.as_ref().map(|filesystem| filesystem.size().0);
        Ok(Self {
            device: device.path.clone(),
            number: device.number,
            size: device.size,
            read_only: device.read_only,
            zero_edges: edges.first_data().is_none(),
            filesystem,
            signatures_behind: end.map_or(Vec::new(), |end| edges.signatures_behind(end)),
            mounts,
        })
    }

    /// Returns every problem of the disk and of its mounts, each with its remedy.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut problems = self.device_problems();
        if let Some(filesystem) = &self.filesystem {
            problems.extend(feature_problems(filesystem.features));
        }
        problems.extend(self.mounts.iter().flat_map(|mount| mount.problems(&self.device)));
        problems
    }

    /// Returns the problems because of which the disk is not mounted.
    pub(crate) fn device_problems(&self) -> Vec<Problem> {
        let device = self.device.display();
        let mut problems = Vec::new();
        let mut add = |problem: String, remedy: String| problems.push(Problem { problem, remedy });
        if self.read_only {
            add(
                format!("{device} is read-only"),
                "make it writable (`blockdev --setrw`), unless the disk itself is write-protected".to_owned(),
            );
        }
        let Some(filesystem) = &self.filesystem else {
            match self.zero_edges {
                true => add(
                    format!("the first and last 4 MiB of {device} are zeros"),
                    "if the disk is empty, format it with `loopfs data-dir format`".to_owned(),
                ),
                false => add(
                    format!("{device} has no XFS"),
                    format!(
                        "give another disk, or a partition with XFS; `wipefs {device}` lists the formats that it knows; data \
                         without a signature is not listed"
                    ),
                ),
            }
            return problems;
        };
        if filesystem.in_progress {
            add(
                format!("mkfs.xfs has not completed on {device}, so it has no file system yet"),
                format!(
                    "wait if mkfs.xfs still runs; otherwise erase what it wrote with `{}`, and format it again",
                    erase_command(&self.device, 0)
                ),
            );
        } else if filesystem.is_damaged() {
            add(
                format!(
                    "the XFS on {device} is damaged: its superblock has a wrong checksum or requires a repair"
                ),
                format!("unmount it and run `xfs_repair {device}`"),
            );
        }
        if filesystem.size() > self.size {
            add(
                format!("the XFS has {} and {device} only {}", filesystem.size(), self.size),
                "give the disk its former size again; the kernel mounts no XFS that is larger than its disk"
                    .to_owned(),
            );
        }
        for signature in &self.signatures_behind {
            add(
                format!("{device} has {signature} behind its XFS"),
                format!(
                    "if the disk is a member of an array, assemble the array and give its device; if the signature is a \
                     remainder, erase it with `wipefs --offset {} {device}`",
                    signature.offset
                ),
            );
        }
        problems
    }
}

/// Returns the command that erases the edge of a device in which a byte is not zero.
pub(crate) fn erase_command(device: &Path, offset: u64) -> String {
    format!("blkdiscard --force --zeroout --offset {offset} --length {EDGE} {}", device.display())
}

/// Returns the superblock with the size that the kernel knows. While the file system is mounted, a new size may be in its log only.
fn with_mounted_size(superblock: Superblock, mounts: &[DataMount]) -> Superblock {
    let mounted = mounts.iter().find_map(|mount| {
        let geometry = xfs::geometry(File::open(&mount.directory).ok()?).ok()?;
        (geometry.uuid == superblock.uuid).then_some(geometry.blocks)
    });
    Superblock { data_blocks: mounted.unwrap_or(superblock.data_blocks), ..superblock }
}

/// Returns the features that volumes need and a file system with these lacks.
pub(crate) fn feature_problems(features: Features) -> Vec<Problem> {
    let Features { crc, reflink, ftype, bigtime: _ } = features;
    let needed = [
        (crc, "XFS version 5 (crc=1)", "kernels will drop version 4"),
        (reflink, "reflink", "volumes cannot be cloned and have no snapshots"),
        (ftype, "ftype", "containers cannot use it for overlayfs"),
    ];
    let lacking = needed.into_iter().filter(|(has, ..)| !has);
    lacking
        .map(|(_, name, effect)| Problem {
            problem: format!("the XFS lacks {name}, so {effect}"),
            remedy: "move the data to a disk formatted with `loopfs data-dir format`".to_owned(),
        })
        .collect()
}

impl DataMount {
    pub(crate) fn of(mount: &Mount) -> Self {
        // Another mount can cover the mount point.
        let opened = File::open(&mount.mount_point).ok();
        let root = opened.filter(|root| mountinfo::holding(std::slice::from_ref(mount), root).is_some());
        let quota = root.and_then(|root| ProjectQuota::of(root.as_fd()).enforcement().ok());
        Self { directory: mount.mount_point.clone(), options: all_options(mount), quota }
    }

    /// Returns the flags of [`MOUNT_FLAGS`] that the mount lacks.
    pub(crate) fn missing_flags(&self) -> Vec<&'static str> {
        let has = |flag: &str| self.options.iter().any(|option| option == flag);
        MOUNT_FLAGS.into_iter().filter(|flag| !has(flag)).collect()
    }

    fn is_read_only(&self) -> bool {
        self.options.iter().any(|option| option == "ro")
    }

    /// Returns the problems of a mount of `device`.
    pub(crate) fn problems(&self, device: &Path) -> Vec<Problem> {
        let problems = [self.flags_problem(), self.read_only_problem(device), self.quota_problem(device)];
        problems.into_iter().flatten().collect()
    }

    /// Returns the problem that the mount lacks one of [`MOUNT_FLAGS`].
    pub(crate) fn flags_problem(&self) -> Option<Problem> {
        let directory = self.directory.display();
        let missing = self.missing_flags().join(",");
        (!missing.is_empty()).then(|| Problem {
            problem: format!("{directory} is mounted without {missing}"),
            remedy: format!(
                "run `mount -o remount,bind,{} {}`",
                MOUNT_FLAGS.join(","),
                quoted(&self.directory)
            ),
        })
    }

    /// Returns the problem that the mount of `device` is read-only.
    pub(crate) fn read_only_problem(&self, device: &Path) -> Option<Problem> {
        self.is_read_only().then(|| Problem {
            problem: format!("{} is mounted read-only", self.directory.display()),
            remedy: format!("look for I/O errors in the kernel log; {}", self.mount_again(device)),
        })
    }

    /// Returns the problem that no project limits are enforced at the mount of `device`.
    pub(crate) fn quota_problem(&self, device: &Path) -> Option<Problem> {
        let directory = self.directory.display();
        match self.quota.map(not_enforced) {
            Some(None) => None,
            Some(Some(reason)) => Some(Problem {
                problem: format!("project limits are not enforced at {directory}"),
                remedy: format!("{reason}; {}", self.mount_again(device)),
            }),
            None => Some(Problem {
                problem: format!("the quotas of {directory} cannot be read"),
                remedy: "unmount what covers the mount point, or run this as root".to_owned(),
            }),
        }
    }

    fn mount_again(&self, device: &Path) -> String {
        let directory = quoted(&self.directory);
        format!("run `umount {directory}` and `loopfs data-dir mount {} {directory}`", quoted(device))
    }
}

/// Returns why a file system does not enforce the limits of projects, or `None` if it does.
pub(crate) fn not_enforced(enforcement: Enforcement) -> Option<&'static str> {
    match enforcement {
        Enforcement::Enforcing => None,
        Enforcement::NoSyscall => Some(
            "the kernel has no quotactl_fd, or a seccomp filter blocks it; Linux 5.14 or later is needed",
        ),
        Enforcement::NoQuota => Some(
            "project quotas are off; the file system must be mounted with option prjquota, and the kernel needs CONFIG_XFS_QUOTA",
        ),
        Enforcement::AccountingOnly => Some(
            "usage is counted but limits are not enforced; mount with option prjquota instead of pqnoenforce",
        ),
    }
}

/// Returns `true` if a file is the root of a mount (`STATX_ATTR_MOUNT_ROOT`, Linux 5.8).
pub(crate) fn is_mount_root(file: impl AsFd) -> rustix::io::Result<bool> {
    let status = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    Ok((status.stx_attributes & status.stx_attributes_mask).contains(StatxAttributes::MOUNT_ROOT))
}

/// Returns the options of a mount and of its file system, each once.
pub(crate) fn all_options(mount: &Mount) -> Vec<String> {
    let further = mount.super_options.iter().filter(|option| !mount.options.contains(option));
    mount.options.iter().chain(further).cloned().collect()
}

#[cfg(test)]
mod tests {
    use loopfs::FilesystemUuid;
    use rstest::rstest;

    use super::*;

    fn disk() -> DataDisk {
        DataDisk {
            device: "/dev/vdb".into(),
            number: DeviceNumber { major: 254, minor: 16 },
            size: Bytes::GIB,
            read_only: false,
            zero_edges: false,
            filesystem: Some(Superblock {
                uuid: FilesystemUuid([7; 16]),
                label: "loopfs".into(),
                block_size: 4096,
                data_blocks: Bytes::GIB.0 / 4096,
                features: Features { crc: true, reflink: true, ftype: true, bigtime: false },
                in_progress: false,
                needs_repair: false,
                checksum_valid: true,
            }),
            signatures_behind: Vec::new(),
            mounts: vec![DataMount {
                directory: "/data".into(),
                options: ["rw", "nosuid", "nodev", "noexec", "prjquota"].map(str::to_owned).into(),
                quota: Some(Enforcement::Enforcing),
            }],
        }
    }

    fn filesystem(disk: &mut DataDisk) -> &mut Superblock {
        disk.filesystem.as_mut().unwrap()
    }

    #[test]
    fn a_suitable_disk_has_no_problem() {
        assert_eq!(disk().problems(), []);
    }

    /// The kernel tests have further problems.
    #[rstest]
    #[case::unrepaired(|disk: &mut DataDisk| filesystem(disk).needs_repair = true, "xfs_repair /dev/vdb")]
    #[case::larger(|disk: &mut DataDisk| filesystem(disk).data_blocks += 1, "its former size")]
    #[case::raid(|disk: &mut DataDisk| disk.signatures_behind.push(Signature { name: "MD RAID 0.90", offset: 4096 }), "wipefs --offset 4096 /dev/vdb")]
    #[case::no_crc(|disk: &mut DataDisk| filesystem(disk).features.crc = false, "version 5")]
    #[case::no_reflink(|disk: &mut DataDisk| filesystem(disk).features.reflink = false, "cannot be cloned")]
    #[case::no_ftype(|disk: &mut DataDisk| filesystem(disk).features.ftype = false, "overlayfs")]
    #[case::no_nodev(|disk: &mut DataDisk| disk.mounts[0].options.retain(|o| o != "nodev"), "without nodev")]
    #[case::no_nosuid(|disk: &mut DataDisk| disk.mounts[0].options.retain(|o| o != "nosuid"), "remount")]
    #[case::mounted_read_only(|disk: &mut DataDisk| disk.mounts[0].options.push("ro".into()), "umount /data")]
    #[case::quota_unknown(|disk: &mut DataDisk| disk.mounts[0].quota = None, "cannot be read")]
    fn each_problem_is_one_line(#[case] change: fn(&mut DataDisk), #[case] says: &str) {
        let mut disk = disk();
        change(&mut disk);
        let problems: Vec<String> = disk.problems().iter().map(Problem::to_string).collect();
        let [line] = &problems[..] else { panic!("{problems:?}") };
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
    }
}
