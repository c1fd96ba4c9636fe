//! Mounting of a data disk, and the expansion of its file system to the size of the disk.

use std::ffi::CString;
use std::fmt::Display;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::block_device::BlockDevice;
use super::check::{DataDisk, DataFilesystemInfo, DataMount, Problem, device_blocks};
use super::log::LogState;
use super::source::DiskSource;
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::filesystem_uuid::FilesystemUuid;
use crate::flock;
use crate::mount::table as mountinfo;
use crate::project_quota::ProjectQuota;
use crate::sys::{mount as sys, xfs};
use crate::units::{Bytes, DeviceNumber};

const OPERATION: &str = "mount the data disk";
const GROW: &str = "expand the XFS at";

/// A data disk that is mounted.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Mounted {
    /// The path of the device, without symbolic links.
    pub device: PathBuf,
    /// The mount point, without symbolic links.
    pub directory: PathBuf,
    /// The UUID of the file system.
    pub uuid: FilesystemUuid,
    /// The disk was mounted there before the call, with the right options.
    pub already_mounted: bool,
    /// The kernel replayed the log, because the file system had not been unmounted.
    pub recovered: bool,
    /// The expansion of the file system, or `None` if the disk had not grown.
    pub growth: Option<Growth>,
}

/// The sizes of a file system before and after its expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Growth {
    /// The size before.
    pub from: Bytes,
    /// The size after.
    pub to: Bytes,
}

/// Mounts the XFS of a disk at `directory` with project quotas, `nodev`, `nosuid` and `noexec`, and expands it if the disk has
/// grown. It never formats a disk. The new mount API (`fsopen(2)` and others, Linux 5.2) keeps the mount detached until the
/// kernel confirms that it enforces project limits.
///
/// The call can be repeated: if the disk is already mounted there with these options, it only expands the file system.
/// Concurrent calls for one directory wait for each other, up to a minute.
///
/// # Errors
/// [`ErrorKind::NotFound`]: no such disk or directory. [`ErrorKind::WrongFilesystem`]: the disk has no XFS, or another file
/// system is mounted there. [`ErrorKind::ReadOnly`]: the disk is read-only. [`ErrorKind::Damaged`]: the file system needs
/// xfs_repair. [`ErrorKind::NotEnforced`]: the kernel does not enforce project limits. [`ErrorKind::AlreadyExists`]: the disk
/// is mounted there with other options, or has the signature of a RAID or of another format behind its file system, which
/// an expansion would overwrite. [`ErrorKind::PermissionDenied`]: no `CAP_SYS_ADMIN`. If the expansion fails, the
/// file system stays mounted, and a repeated call tries it again.
#[doc(alias = "fsopen")]
#[doc(alias = "fsmount")]
#[doc(alias = "XFS_IOC_FSGROWFSDATA")]
pub fn mount(source: &DiskSource, directory: &Path) -> Result<Mounted> {
    let directory = fs::canonicalize(directory).map_err(|error| {
        let error = Err::<(), _>(error).context(OPERATION, directory.display()).unwrap_err();
        match error.kind() {
            ErrorKind::NotFound => error.with_remedy("create the directory with `mkdir`"),
            _ => error,
        }
    })?;
    let opened = File::open(&directory).context(OPERATION, directory.display())?;
    if !opened.metadata().context(OPERATION, directory.display())?.is_dir() {
        return Err(Error::sys(OPERATION, directory.display(), Errno::ENOTDIR));
    }
    // The lock is on the directory below the mount point, or on the root of the file system if that is already mounted.
    let _lock = flock::exclusive(opened, flock::DEFAULT_TIMEOUT, OPERATION)?;
    let device = source.open(OPERATION)?;
    let disk = DataDisk::of_device(&device)?;
    let filesystem = require_usable(&disk)?;
    let already_mounted = is_mounted(&disk, &directory)?;
    if !already_mounted {
        attach(&disk, filesystem, &directory)?;
    }
    Ok(Mounted {
        growth: grow(&directory, filesystem.uuid, device.number)?,
        uuid: filesystem.uuid,
        already_mounted,
        recovered: !already_mounted && filesystem.log == LogState::NeedsRecovery,
        device: device.path,
        directory,
    })
}

/// Returns the file system of a disk that can be mounted.
fn require_usable(disk: &DataDisk) -> Result<&DataFilesystemInfo> {
    let kind = match &disk.filesystem {
        _ if disk.read_only => ErrorKind::ReadOnly,
        None => ErrorKind::WrongFilesystem,
        Some(filesystem) if filesystem.incomplete || filesystem.damaged || filesystem.size > disk.size => {
            ErrorKind::Damaged
        }
        Some(_) => ErrorKind::AlreadyExists,
    };
    // The order of the problems is that of the kinds.
    let problem = disk.device_problems().into_iter().next();
    match (problem, &disk.filesystem) {
        (None, Some(filesystem)) => Ok(filesystem),
        (problem, _) => {
            let problem = problem.map(Explanation::from).unwrap_or_default();
            Err(Error::new(kind, OPERATION, disk.device.display(), problem))
        }
    }
}

/// Returns `true` if the disk is mounted at `directory` with the right options, and `false` if nothing is mounted there.
fn is_mounted(disk: &DataDisk, directory: &Path) -> Result<bool> {
    let mounts = mountinfo::read()?;
    let Some(found) = mountinfo::at(&mounts, directory) else { return Ok(false) };
    let shown = directory.display();
    if found.device != disk.number || found.root != Path::new("/") {
        let cause = format!(
            "{} ({}) is mounted there, and not {}",
            found.source.display(),
            found.fs_type,
            disk.device.display()
        );
        return Err(Error::new(ErrorKind::WrongFilesystem, OPERATION, &shown, cause)
            .with_remedy(format!("unmount it (`umount {shown}`) or give another directory")));
    }
    let problems = disk.mounts.iter().filter(|mount| mount.directory == directory);
    match problems.flat_map(|mount| mount.problems(&disk.device)).next() {
        None => Ok(true),
        Some(Problem { problem, remedy }) => {
            let cause = format!("the disk is already mounted, but {problem}");
            Err(Error::new(ErrorKind::AlreadyExists, OPERATION, shown, cause).with_remedy(remedy))
        }
    }
}

/// Mounts the disk at a directory. The mount becomes visible only if the kernel enforces project limits on it.
fn attach(disk: &DataDisk, filesystem: &DataFilesystemInfo, directory: &Path) -> Result<()> {
    let (device, target) = (c_string(&disk.device)?, c_string(directory)?);
    let shown = disk.device.display();
    let context = sys::xfs_context(&device).map_err(|errno| explain_context(errno, disk))?;
    sys::create_filesystem(&context).map_err(|errno| explain_creation(errno, disk, &messages(&context)))?;
    let tree = sys::hardened_mount(&context).context(OPERATION, &shown)?;
    // The descriptor of a detached mount is one of O_PATH, which takes no ioctl.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = openat(&tree, ".", flags, Mode::empty()).context(OPERATION, &shown)?;
    require_same(&root, filesystem, disk)?;
    if let Some((kind, problem)) = ProjectQuota::of(root.as_fd()).enforcement()?.problem() {
        return Err(Error::new(kind, OPERATION, shown, not_enforced(problem, disk.mounts.first())));
    }
    sys::attach_tree(&tree, rustix::fs::CWD, &target).context(OPERATION, directory.display())
}

/// Returns why a new mount has no project limits: if the disk is mounted elsewhere without them, the kernel uses that file system.
fn not_enforced(problem: Explanation, elsewhere: Option<&DataMount>) -> Explanation {
    let Some(DataMount { directory, .. }) = elsewhere else { return problem };
    let cause = format!("the disk is mounted at {} without enforced project limits", directory.display());
    Explanation::from(cause).with_remedy(format!("unmount it there first; {problem}"))
}

/// Checks that the mount has the file system that was checked: another disk can have got the path in the meantime.
fn require_same(root: &OwnedFd, filesystem: &DataFilesystemInfo, disk: &DataDisk) -> Result<()> {
    let geometry = xfs::geometry(root).context(OPERATION, disk.device.display())?;
    let found = FilesystemUuid(geometry.uuid);
    if found == filesystem.uuid {
        return Ok(());
    }
    let cause = format!("the file system {found} was mounted instead of {}", filesystem.uuid);
    Err(Error::new(ErrorKind::WrongFilesystem, OPERATION, disk.device.display(), cause)
        .with_remedy("try again"))
}

fn c_string(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|nul| Error::new(ErrorKind::InvalidInput, OPERATION, path.display(), nul.to_string()))
}

fn explain_context(errno: Errno, disk: &DataDisk) -> Error {
    let error = Error::sys(OPERATION, disk.device.display(), errno);
    match errno {
        Errno::ENODEV => error
            .with_kind(ErrorKind::Unsupported)
            .explain("the kernel has no XFS")
            .with_remedy("load its module (`modprobe xfs`)"),
        Errno::EINVAL => error
            .with_kind(ErrorKind::Unsupported)
            .explain("the kernel's XFS has no option prjquota")
            .with_remedy("it needs CONFIG_XFS_QUOTA"),
        Errno::EPERM => error.with_remedy("run this as root (CAP_SYS_ADMIN)"),
        _ => error,
    }
}

fn explain_creation(errno: Errno, disk: &DataDisk, messages: &str) -> Error {
    const SEE_LOG: &str = "the kernel log has the details";
    let device = disk.device.display();
    let error = Error::sys(OPERATION, &device, errno);
    let (kind, explanation) = match errno {
        // XFS returns EFSCORRUPTED and EFSBADCRC under these names.
        Errno::EUCLEAN | Errno::EBADMSG => {
            let cause = format!("the kernel refuses the file system as damaged, and {SEE_LOG}");
            let remedy = format!(
                "run `xfs_repair {device}` (with -L only if the log cannot be replayed: that loses the last changes)"
            );
            (ErrorKind::Damaged, Explanation::from(cause).with_remedy(remedy))
        }
        Errno::EINVAL => {
            let cause =
                "the kernel does not support a feature of this XFS, or was built without CONFIG_XFS_QUOTA";
            (ErrorKind::Unsupported, Explanation::of(cause, SEE_LOG))
        }
        Errno::EBUSY => {
            let users = BlockDevice::open(&disk.device, OPERATION).ok().and_then(|device| device.users());
            let users = users.unwrap_or("in use by another program".to_owned());
            let cause = format!("the device is {users}");
            (ErrorKind::Busy, Explanation::from(cause).with_remedy("end that first"))
        }
        Errno::EIO => (error.kind(), Explanation::of("the disk cannot be read or written", SEE_LOG)),
        _ => (error.kind(), Explanation::default()),
    };
    error.with_kind(kind).explain(explanation.after(messages))
}

/// Returns the messages that the kernel left in a context of the mount API, without the letter that is their level.
fn messages(context: &OwnedFd) -> String {
    let mut messages = Vec::new();
    let mut buffer = [0; 1024];
    // The context keeps at most eight messages.
    for _ in 0..8 {
        let Ok(length) = sys::read_message(context, &mut buffer) else { break };
        let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
        messages.push(text.split_once(' ').map_or(text.as_str(), |(_, message)| message).trim().to_owned());
    }
    messages.join("; ")
}

/// Expands the file system mounted at `directory` to the size of its device. If the disk is unmounted concurrently, the path
/// leads to another file system, whose UUID is not the expected one.
fn grow(directory: &Path, expected: FilesystemUuid, device: DeviceNumber) -> Result<Option<Growth>> {
    let shown = directory.display();
    let root = File::open(directory).context(GROW, &shown)?;
    let geometry = xfs::geometry(&root).map_err(|errno| no_longer_mounted(&shown, errno))?;
    require_expected(FilesystemUuid(geometry.uuid), expected, &shown)?;
    let blocks = device_blocks(device, geometry.blocksize)?;
    if blocks <= geometry.datablocks {
        return Ok(None);
    }
    xfs::grow_data(&root, blocks, geometry.imaxpct).map_err(|errno| {
        Error::sys(GROW, &shown, errno)
            .explain("it stays mounted with its former size")
            .with_remedy("look into the kernel log, and try again")
    })?;
    let size = |blocks: u64| Bytes(blocks.saturating_mul(geometry.blocksize.into()));
    let after = xfs::geometry(&root).context(GROW, &shown)?.datablocks;
    let grown = after > geometry.datablocks;
    Ok(grown.then(|| Growth { from: size(geometry.datablocks), to: size(after) }))
}

/// Returns the error for a directory whose file system has no geometry of XFS.
fn no_longer_mounted(directory: impl Display, errno: Errno) -> Error {
    let error = Error::sys(GROW, directory, errno);
    match errno {
        Errno::ENOTTY => {
            error.explain("another process has unmounted the disk").with_remedy("mount it again")
        }
        _ => error,
    }
}

/// Checks that the file system at a directory is the one that was mounted.
fn require_expected(found: FilesystemUuid, expected: FilesystemUuid, directory: impl Display) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let detail = format!(
        "the file system {found} is there instead of {expected}; another process has unmounted the disk"
    );
    Err(Error::new(ErrorKind::WrongFilesystem, GROW, directory, detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_disk::signature::Signature;

    #[test]
    fn another_file_system_at_the_mount_point_is_not_expanded() {
        let (data, parent) = (FilesystemUuid([1; 16]), FilesystemUuid([2; 16]));
        assert!(require_expected(data, data, "/data").is_ok());
        let error = require_expected(parent, data, "/data").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongFilesystem, "{error}");
        assert!(error.to_string().contains(&parent.to_string()), "{error}");
        // A directory on a file system without the geometry of XFS.
        let error = grow(Path::new("/proc"), data, DeviceNumber { major: 7, minor: 0 }).unwrap_err();
        assert!(
            error.to_string().contains("/proc") && error.to_string().contains("mount it again"),
            "{error}"
        );
    }

    #[test]
    fn a_signature_behind_the_file_system_keeps_the_disk_from_being_mounted() {
        let mut disk = crate::data_disk::check::tests::disk();
        assert!(require_usable(&disk).is_ok());
        let filesystem = disk.filesystem.as_mut().unwrap();
        filesystem.size = Bytes(filesystem.size.0 - (1 << 20));
        disk.signatures.push(Signature { name: "MD RAID 0.90", offset: Bytes::GIB.0 - 65_536 });
        let error = require_usable(&disk).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains("MD RAID 0.90"), "{error}");
    }

    #[test]
    fn a_missing_directory_and_a_file_are_errors_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let source = DiskSource::Path("/dev/null".into());
        let error = mount(&source, &directory.path().join("absent")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains("mkdir"), "{error}");
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(mount(&source, &file).unwrap_err().errno(), Some(libc::ENOTDIR));
        let error = mount(&source, directory.path()).unwrap_err();
        assert!(error.to_string().contains("/dev/null: it is no block device"), "{error}");
    }
}
