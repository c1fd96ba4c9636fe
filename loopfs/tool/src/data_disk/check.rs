//! The check of a data disk: the facts, and the problems that follow from them.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use loopfs::mount::table::{self as mountinfo, Mount};
use loopfs::project_quota::{Enforcement, ProjectQuota};
use loopfs::xfs::{self, Features};
use loopfs::{Bytes, DeviceNumber, FilesystemUuid};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};

use super::block_device::{BlockDevice, size_of};
use super::log::LogState;
use super::signature::{Edges, Signature};
use super::source::DiskSource;
use super::superblock::Superblock;
use crate::shell::quoted;

const OPERATION: &str = "check the data disk";

/// The flags of the mount of a data disk, in this order in messages.
pub(crate) const MOUNT_FLAGS: [&str; 3] = ["nodev", "nosuid", "noexec"];

/// An allocation group has at least this many blocks.
const MIN_GROUP_BLOCKS: u64 = 64;

/// A data disk: a device, what is on it, and where that is mounted.
#[derive(Clone, Debug)]
pub(crate) struct DataDisk {
    /// The path of the device, without symbolic links.
    pub(crate) device: PathBuf,
    /// The number of the device.
    pub(crate) number: DeviceNumber,
    /// The size of the device.
    pub(crate) size: Bytes,
    /// The device takes no writes.
    pub(crate) read_only: bool,
    /// The signatures of file systems, partition tables and volume managers.
    pub(crate) signatures: Vec<Signature>,
    /// The XFS on it, or `None` if it has none.
    pub(crate) filesystem: Option<DataFilesystemInfo>,
    /// Where the root of the XFS is mounted in the mount namespace of this process.
    pub(crate) mounts: Vec<DataMount>,
}

/// The XFS on a data disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataFilesystemInfo {
    /// The UUID.
    pub(crate) uuid: FilesystemUuid,
    /// The label, which may be empty. Any program with access to the device can choose it.
    pub(crate) label: String,
    /// The size.
    pub(crate) size: Bytes,
    /// The size of its blocks.
    pub(crate) block_size: u32,
    /// The size of its allocation groups, in blocks. The last group can be smaller.
    pub(crate) group_blocks: u32,
    /// Its features.
    pub(crate) features: Features,
    /// The state of its log.
    pub(crate) log: LogState,
    /// mkfs.xfs has not completed.
    pub(crate) incomplete: bool,
    /// The checksum of the superblock is wrong, or xfs_repair was not completed.
    pub(crate) damaged: bool,
}

/// A mount of a data disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataMount {
    /// The mount point.
    pub(crate) directory: PathBuf,
    /// The options of the mount and of the file system, as in `/proc/self/mountinfo`.
    pub(crate) options: Vec<String>,
    /// How the kernel treats project limits, as quotactl_fd(2) returns it. `None` if the mount point cannot be opened, or
    /// another mount covers it.
    pub(crate) quota: Option<Enforcement>,
}

/// A reason why a disk cannot be used for volumes, or not for all of their features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// What is wrong.
    pub(crate) problem: String,
    /// What to do.
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
        let filesystem = match superblock {
            Some(superblock) => Some(DataFilesystemInfo::of(device, &superblock, &mounts)?),
            None => None,
        };
        Ok(Self {
            device: device.path.clone(),
            number: device.number,
            size: device.size,
            read_only: device.read_only,
            signatures: edges.signatures(),
            filesystem,
            mounts,
        })
    }

    /// Returns the bytes by which the file system is smaller than its device: the disk has grown, and the next mount by
    /// [`mount`](super::mount) expands the file system. Returns 0 if a signature behind the file system prevents that.
    pub(crate) fn unused(&self) -> Bytes {
        if self.foreign_signatures().next().is_some() {
            return Bytes(0);
        }
        self.filesystem.as_ref().map_or(Bytes(0), |filesystem| {
            let block_size = u64::from(filesystem.block_size.max(1));
            let blocks = self.size.0 / block_size;
            let last_group = blocks % u64::from(filesystem.group_blocks.max(1));
            // The kernel adds no last group that is too small. It expands an existing one by any number of blocks.
            let too_small = if last_group < MIN_GROUP_BLOCKS { last_group } else { 0 };
            Bytes((blocks - too_small) * block_size).saturating_sub(filesystem.size)
        })
    }

    /// Returns the signatures behind the file system, such as those of a RAID with its metadata at the end. An expansion would
    /// overwrite them. A signature within the file system is content of its files.
    pub(crate) fn foreign_signatures(&self) -> impl Iterator<Item = &Signature> {
        let end = self.filesystem.as_ref().map(|filesystem| filesystem.size.0);
        self.signatures.iter().filter(move |signature| end.is_some_and(|end| signature.offset >= end))
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
            let found: Vec<String> = self.signatures.iter().map(Signature::to_string).collect();
            let (found, remedy) = match found.is_empty() {
                true => (
                    "and no known signature".to_owned(),
                    "if the disk is empty, format it with `loopfs data-dir format`",
                ),
                false => (format!("but {}", found.join(", ")), "give another disk, or a partition with XFS"),
            };
            add(format!("{device} has no XFS, {found}"), remedy.to_owned());
            return problems;
        };
        if filesystem.incomplete {
            add(
                format!("mkfs.xfs has not completed on {device}, so it has no file system yet"),
                format!(
                    "wait if mkfs.xfs still runs; otherwise erase what it wrote with `{}`, and format it again",
                    erase_command(&self.device, 0)
                ),
            );
        } else if filesystem.damaged {
            add(
                format!(
                    "the XFS on {device} is damaged: its superblock has a wrong checksum or requires a repair"
                ),
                format!("unmount it and run `xfs_repair {device}`"),
            );
        }
        if filesystem.size > self.size {
            add(
                format!("the XFS has {} and {device} only {}", filesystem.size, self.size),
                "give the disk its former size again; the kernel mounts no XFS that is larger than its disk"
                    .to_owned(),
            );
        }
        for signature in self.foreign_signatures() {
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
    let length = super::signature::EDGE;
    format!("blkdiscard --force --zeroout --offset {offset} --length {length} {}", device.display())
}

impl DataFilesystemInfo {
    fn of(device: &BlockDevice, superblock: &Superblock, mounts: &[DataMount]) -> Result<Self> {
        // While the file system is mounted, a new size may be in its log only.
        let mounted = mounts.iter().find_map(|mount| {
            let geometry = xfs::geometry(File::open(&mount.directory).ok()?).ok()?;
            let same = geometry.uuid == superblock.uuid;
            same.then(|| Bytes(geometry.blocks.saturating_mul(geometry.block_size.into())))
        });
        let log = match mounts.is_empty() {
            true => device
                .log_state(superblock)
                .with_context(|| format!("{OPERATION} {}", device.path.display()))?,
            false => LogState::InUse,
        };
        Ok(Self {
            uuid: superblock.uuid,
            label: superblock.label.clone(),
            size: mounted.unwrap_or(superblock.size()),
            block_size: superblock.block_size,
            group_blocks: superblock.group_blocks,
            features: superblock.features,
            log,
            incomplete: superblock.in_progress,
            damaged: superblock.needs_repair || !superblock.checksum_valid,
        })
    }
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
        let mut options = mount.options.clone();
        let further = mount.super_options.iter().filter(|option| !mount.options.contains(option));
        options.extend(further.cloned());
        Self { directory: mount.mount_point.clone(), options, quota }
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

/// Returns the size that the file system on a device can have.
pub(crate) fn device_blocks(number: DeviceNumber, block_size: u32) -> Result<u64> {
    Ok(size_of(number)?.0 / u64::from(block_size.max(1)))
}

#[cfg(test)]
pub(super) mod tests {
    use rstest::rstest;

    use super::*;

    pub(in crate::data_disk) fn disk() -> DataDisk {
        DataDisk {
            device: "/dev/vdb".into(),
            number: DeviceNumber { major: 254, minor: 16 },
            size: Bytes::GIB,
            read_only: false,
            signatures: vec![Signature { name: "XFS", offset: 0 }],
            filesystem: Some(DataFilesystemInfo {
                uuid: FilesystemUuid([7; 16]),
                label: "loopfs".into(),
                size: Bytes::GIB,
                block_size: 4096,
                group_blocks: 65_536,
                features: Features { crc: true, reflink: true, ftype: true, bigtime: false },
                log: LogState::Clean,
                incomplete: false,
                damaged: false,
            }),
            mounts: vec![DataMount {
                directory: "/data".into(),
                options: ["rw", "nosuid", "nodev", "noexec", "prjquota"].map(str::to_owned).into(),
                quota: Some(Enforcement::Enforcing),
            }],
        }
    }

    fn filesystem(disk: &mut DataDisk) -> &mut DataFilesystemInfo {
        disk.filesystem.as_mut().unwrap()
    }

    #[test]
    fn a_suitable_disk_has_no_problem() {
        assert_eq!(disk().problems(), []);
    }

    #[rstest]
    #[case::read_only(|disk: &mut DataDisk| disk.read_only = true, "blockdev --setrw")]
    #[case::no_xfs(|disk: &mut DataDisk| disk.filesystem = None, "another disk")]
    #[case::incomplete(|disk: &mut DataDisk| filesystem(disk).incomplete = true, "blkdiscard")]
    #[case::damaged(|disk: &mut DataDisk| filesystem(disk).damaged = true, "xfs_repair /dev/vdb")]
    #[case::larger(|disk: &mut DataDisk| filesystem(disk).size = Bytes(Bytes::GIB.0 + 4096), "its former size")]
    #[case::raid_at_the_end(|disk: &mut DataDisk| {
        filesystem(disk).size = Bytes(Bytes::GIB.0 - 65_536);
        disk.signatures.push(Signature { name: "MD RAID 1.0", offset: Bytes::GIB.0 - 8192 });
    }, "/dev/vdb has MD RAID 1.0 (at byte 1073733632) behind its XFS: if the disk is a member")]
    #[case::no_crc(|disk: &mut DataDisk| filesystem(disk).features.crc = false, "version 5")]
    #[case::no_reflink(|disk: &mut DataDisk| filesystem(disk).features.reflink = false, "cannot be cloned")]
    #[case::no_ftype(|disk: &mut DataDisk| filesystem(disk).features.ftype = false, "overlayfs")]
    #[case::no_nodev(|disk: &mut DataDisk| disk.mounts[0].options.retain(|o| o != "nodev"), "without nodev")]
    #[case::no_nosuid(|disk: &mut DataDisk| disk.mounts[0].options.retain(|o| o != "nosuid"), "remount")]
    #[case::no_noexec(|disk: &mut DataDisk| disk.mounts[0].options.retain(|o| o != "noexec"), "remount")]
    #[case::mounted_read_only(|disk: &mut DataDisk| disk.mounts[0].options.push("ro".into()), "umount /data")]
    #[case::no_quota(|disk: &mut DataDisk| disk.mounts[0].quota = Some(Enforcement::NoQuota), "prjquota")]
    #[case::quota_only_counted(|disk: &mut DataDisk| disk.mounts[0].quota = Some(Enforcement::AccountingOnly), "pqnoenforce")]
    #[case::quota_unknown(|disk: &mut DataDisk| disk.mounts[0].quota = None, "cannot be read")]
    fn each_problem_is_one_line(#[case] change: fn(&mut DataDisk), #[case] says: &str) {
        let mut disk = disk();
        change(&mut disk);
        let problems: Vec<String> = disk.problems().iter().map(Problem::to_string).collect();
        let [line] = &problems[..] else { panic!("{problems:?}") };
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
    }

    #[test]
    fn another_filesystem_is_named() {
        let signatures = vec![Signature { name: "ext2, ext3 or ext4", offset: 1080 }];
        let disk = DataDisk { filesystem: None, mounts: Vec::new(), signatures, ..disk() };
        assert!(disk.problems()[0].to_string().contains("ext2, ext3 or ext4 (at byte 1080)"));
    }

    /// A foreign signature lies behind the end of the file system.
    #[rstest]
    #[case::first_byte_behind(Bytes::GIB.0, 1)]
    #[case::last_byte_within(Bytes::GIB.0 - 1, 0)]
    fn only_trailing_signatures_are_foreign(#[case] offset: u64, #[case] expected: usize) {
        let mut disk = DataDisk { size: Bytes(2 * Bytes::GIB.0), ..disk() };
        disk.signatures.push(Signature { name: "MD RAID 0.90", offset });
        assert_eq!(disk.foreign_signatures().count(), expected);
    }

    /// A new allocation group needs at least 64 blocks, so a smaller rest does not count.
    #[test]
    fn the_filesystem_can_use_unused_bytes() {
        let mut disk = disk();
        assert_eq!(disk.unused(), Bytes(0));
        disk.size = Bytes(Bytes::GIB.0 + 63 * 4096);
        assert_eq!(disk.unused(), Bytes(0));
        disk.size = Bytes(Bytes::GIB.0 + 64 * 4096);
        assert_eq!(disk.unused(), Bytes(64 * 4096));
        // The last group has 1000 blocks, and the kernel expands it by one.
        filesystem(&mut disk).size = Bytes(Bytes::GIB.0 + 1000 * 4096);
        disk.size = Bytes(Bytes::GIB.0 + 1001 * 4096);
        assert_eq!(disk.unused(), Bytes(4096));
        disk.signatures.push(Signature { name: "DDF RAID", offset: disk.size.0 - 512 });
        assert_eq!(disk.unused(), Bytes(0));
    }
}
