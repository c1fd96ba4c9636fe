//! Mounting of a data disk, and the expansion of its file system to the size of the disk.

use std::fmt::Display;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail};
use loopfs::mount::table as mountinfo;
use loopfs::project_quota::ProjectQuota;
use loopfs::{Bytes, DeviceNumber, ErrorKind, FilesystemUuid, xfs};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};

use super::block_device::{size_of, users};
use super::check::{DataDisk, Problem, not_enforced};
use super::lock;
use super::source::DiskSource;
use super::superblock::Superblock;

const OPERATION: &str = "mount the data disk";
const GROW: &str = "expand the XFS at";

/// How long concurrent calls for one directory wait for each other.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// A data disk that is mounted.
#[derive(Clone, Debug)]
pub(crate) struct Mounted {
    /// The path of the device, without symbolic links.
    pub(crate) device: PathBuf,
    /// The mount point, without symbolic links.
    pub(crate) directory: PathBuf,
    pub(crate) uuid: FilesystemUuid,
    /// The disk was mounted there before the call, with the right options.
    pub(crate) already_mounted: bool,
    /// The sizes of the file system before and after its expansion, or `None` if the disk had not grown.
    pub(crate) growth: Option<(Bytes, Bytes)>,
}

/// Mounts the XFS of a disk at `directory` with project quotas, `nodev`, `nosuid` and `noexec`, and expands it if the disk has
/// grown. It never formats a disk. The new mount API (`fsopen(2)` and others, Linux 5.2) keeps the mount detached until the
/// kernel confirms that it enforces project limits.
///
/// The call can be repeated: if the disk is already mounted there with these options, it only expands the file system.
/// Concurrent calls for one directory wait for each other, up to a minute. If the expansion fails, the file system stays mounted, and
/// a repeated call tries it again.
pub(crate) fn mount(source: &DiskSource, directory: &Path) -> Result<Mounted> {
    let directory = fs::canonicalize(directory).map_err(|error| {
        let remedy = match error.kind() {
            std::io::ErrorKind::NotFound => ": create the directory with `mkdir`",
            _ => "",
        };
        Error::new(error).context(format!("{OPERATION} {}{remedy}", directory.display()))
    })?;
    let shown = || format!("{OPERATION} {}", directory.display());
    let opened = File::open(&directory).with_context(shown)?;
    if !opened.metadata().with_context(shown)?.is_dir() {
        return Err(Errno::NOTDIR).with_context(shown);
    }
    // The lock is on the directory below the mount point, or on the root of the file system if that is already mounted.
    if !lock::exclusive(&opened, LOCK_TIMEOUT).with_context(shown)? {
        bail!("{}: another process has locked the directory; `lslocks` on the node lists it", shown());
    }
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
        device: device.path,
        directory,
    })
}

/// Returns the file system of a disk that can be mounted.
fn require_usable(disk: &DataDisk) -> Result<&Superblock> {
    let device = disk.device.display();
    match (disk.device_problems().into_iter().next(), &disk.filesystem) {
        (None, Some(filesystem)) => Ok(filesystem),
        (Some(Problem { problem, remedy }), _) => bail!("{OPERATION} {device}: {problem}; {remedy}"),
        (None, None) => bail!("{OPERATION} {device}: it has no XFS"),
    }
}

/// Returns `true` if the disk is mounted at `directory` with the right options, and `false` if nothing is mounted there.
fn is_mounted(disk: &DataDisk, directory: &Path) -> Result<bool> {
    let mounts = mountinfo::read()?;
    let Some(found) = mountinfo::at(&mounts, directory) else { return Ok(false) };
    let shown = directory.display();
    if found.device != disk.number || found.root != Path::new("/") {
        bail!(
            "{OPERATION} {shown}: {} ({}) is mounted there, and not {}; unmount it (`umount {shown}`) or give another directory",
            found.source.display(),
            found.fs_type,
            disk.device.display()
        );
    }
    let problems = disk.mounts.iter().filter(|mount| mount.directory == directory);
    match problems.flat_map(|mount| mount.problems(&disk.device)).next() {
        None => Ok(true),
        Some(Problem { problem, remedy }) => {
            bail!("{OPERATION} {shown}: the disk is already mounted, but {problem}; {remedy}")
        }
    }
}

/// Mounts the disk at a directory. The mount becomes visible only if the kernel enforces project limits on it.
fn attach(disk: &DataDisk, filesystem: &Superblock, directory: &Path) -> Result<()> {
    let shown = || format!("{OPERATION} {}", disk.device.display());
    let context = xfs_context(&disk.device).map_err(|errno| explain_context(errno, disk))?;
    // The kernel reads the superblock, and replays the log if it has to. If the file system is already mounted somewhere, it uses that
    // one and ignores the options of the context.
    fsconfig_create(&context).map_err(|errno| explain_creation(errno, disk, &messages(&context)))?;
    let flags = MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags).with_context(shown)?;
    // The descriptor of a detached mount is one of O_PATH, which takes no ioctl.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(&tree, ".", flags, Mode::empty()).with_context(shown)?;
    // Another disk can have got the path in the meantime.
    let found = xfs::geometry(&root)?.uuid;
    if found != filesystem.uuid {
        bail!("{}: the file system {found} was mounted instead of {}; try again", shown(), filesystem.uuid);
    }
    if let Some(reason) = not_enforced(ProjectQuota::of(root.as_fd()).enforcement()?) {
        // If the disk is mounted elsewhere without limits, the kernel uses that file system.
        let Some(elsewhere) = disk.mounts.first() else { bail!("{}: {reason}", shown()) };
        let elsewhere = elsewhere.directory.display();
        bail!(
            "{}: the disk is mounted at {elsewhere} without enforced project limits; unmount it there first; {reason}",
            shown()
        );
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&tree, "", CWD, directory, flags)
        .with_context(|| format!("{OPERATION} {}", directory.display()))
}

/// Returns a context for a new mount of a device with project quotas.
fn xfs_context(device: &Path) -> rustix::io::Result<OwnedFd> {
    let context = fsopen("xfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", device)?;
    fsconfig_set_flag(&context, "prjquota")?;
    Ok(context)
}

fn explain_context(errno: Errno, disk: &DataDisk) -> Error {
    let explanation = match errno {
        Errno::NODEV => ": the kernel has no XFS; load its module (`modprobe xfs`)",
        Errno::INVAL => ": the kernel's XFS has no option prjquota; it needs CONFIG_XFS_QUOTA",
        Errno::PERM => ": run this as root (CAP_SYS_ADMIN)",
        _ => "",
    };
    Error::new(errno).context(format!("{OPERATION} {}{explanation}", disk.device.display()))
}

fn explain_creation(errno: Errno, disk: &DataDisk, messages: &str) -> Error {
    const SEE_LOG: &str = "the kernel log has the details";
    let device = disk.device.display();
    let explanation = match errno {
        // XFS returns EFSCORRUPTED and EFSBADCRC under these names.
        Errno::UCLEAN | Errno::BADMSG => format!(
            "the kernel refuses the file system as damaged, and {SEE_LOG}; run `xfs_repair {device}` (with -L only if the log \
             cannot be replayed: that loses the last changes)"
        ),
        Errno::INVAL => format!(
            "the kernel does not support a feature of this XFS, or was built without CONFIG_XFS_QUOTA; {SEE_LOG}"
        ),
        Errno::BUSY => format!("the device is {}; end that first", users(&disk.device)),
        Errno::IO => format!("the disk cannot be read or written; {SEE_LOG}"),
        _ => String::new(),
    };
    let mut text = format!("{OPERATION} {device}");
    let parts = [messages, &explanation].into_iter().filter(|part| !part.is_empty());
    for (part, separator) in parts.zip([": ", "; "]) {
        text.push_str(separator);
        text.push_str(part);
    }
    Error::new(errno).context(text)
}

/// Returns the messages that the kernel left in a context of the mount API, without the letter that is their level.
fn messages(context: &OwnedFd) -> String {
    let mut messages = Vec::new();
    let mut buffer = [0; 1024];
    // The context keeps at most eight messages.
    for _ in 0..8 {
        // ENODATA: there is no further one.
        let Ok(length) = rustix::io::read(context, &mut buffer) else { break };
        let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
        messages.push(text.split_once(' ').map_or(text.as_str(), |(_, message)| message).trim().to_owned());
    }
    messages.join("; ")
}

/// Expands the file system mounted at `directory` to the size of its device. If the disk is unmounted concurrently, the path
/// leads to another file system, whose UUID is not the expected one.
fn grow(directory: &Path, expected: FilesystemUuid, device: DeviceNumber) -> Result<Option<(Bytes, Bytes)>> {
    let shown = format!("{GROW} {}", directory.display());
    let root = File::open(directory).context(shown.clone())?;
    let geometry = xfs::geometry(&root).map_err(|error| match error.kind() {
        ErrorKind::Unsupported => anyhow!("{shown}: another process has unmounted the disk; mount it again"),
        _ => Error::new(error).context(shown.clone()),
    })?;
    require_expected(geometry.uuid, expected, &shown)?;
    let blocks = size_of(device)?.0 / u64::from(geometry.block_size.max(1));
    if blocks <= geometry.blocks {
        return Ok(None);
    }
    xfs::expand(&root, blocks).with_context(|| {
        format!("{shown}: it stays mounted with its former size; look into the kernel log, and try again")
    })?;
    let size = |blocks: u64| Bytes(blocks.saturating_mul(geometry.block_size.into()));
    let after = xfs::geometry(&root)?.blocks;
    Ok((after > geometry.blocks).then(|| (size(geometry.blocks), size(after))))
}

/// Checks that the file system at a directory is the one that was mounted.
fn require_expected(found: FilesystemUuid, expected: FilesystemUuid, shown: impl Display) -> Result<()> {
    if found != expected {
        bail!(
            "{shown}: the file system {found} is there instead of {expected}; another process has unmounted the disk"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The other file system is mounted at the mount point.
    #[test]
    fn another_filesystem_is_not_expanded() {
        let (data, parent) = (FilesystemUuid([1; 16]), FilesystemUuid([2; 16]));
        assert!(require_expected(data, data, "/data").is_ok());
        let error = require_expected(parent, data, "/data").unwrap_err();
        assert!(error.to_string().contains(&parent.to_string()), "{error}");
        // A directory on a file system without the geometry of XFS.
        let error = grow(Path::new("/proc"), data, DeviceNumber { major: 7, minor: 0 }).unwrap_err();
        assert!(
            error.to_string().contains("/proc") && error.to_string().contains("mount it again"),
            "{error}"
        );
    }

    #[test]
    fn unsuitable_mount_points_have_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let source = DiskSource::Path("/dev/null".into());
        let error = mount(&source, &directory.path().join("absent")).unwrap_err();
        assert!(error.to_string().contains("mkdir"), "{error}");
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(mount(&source, &file).unwrap_err().downcast_ref(), Some(&Errno::NOTDIR));
        let error = mount(&source, directory.path()).unwrap_err();
        assert!(error.to_string().contains("/dev/null: it is no block device"), "{error}");
    }
}
