//! Filesystem volumes: the volume's directory is bind-mounted at the target.

use std::ffi::OsString;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::sys::stat::{FileStat, stat};

use super::target::Target;
use crate::DeviceNumber;
use crate::error::{Error, ErrorKind, Result};
use crate::loop_device::BackingFile;
use crate::mount::{AccessTime, KnownMount, MountFlags, table as mountinfo};
use crate::volume_store::Volume;

/// The directory of a volume. Its identity is its device and inode number, not a path.
pub(super) struct Directory {
    name: OsString,
    fd: OwnedFd,
    identity: BackingFile,
}

impl Directory {
    pub(super) fn open(volume: &Volume) -> Result<Self> {
        let fd = volume.open_dir()?;
        let identity = BackingFile::of(&fd)?;
        Ok(Self { name: volume.id().as_str().into(), fd, identity })
    }

    /// Returns `true` if a path with this status is the directory.
    pub(super) fn matches(&self, status: &FileStat) -> bool {
        let device = DeviceNumber::from_raw(status.st_dev);
        self.identity == BackingFile { device, inode: status.st_ino }
    }

    /// Bind-mounts the directory at the target with exactly these flags.
    pub(super) fn publish(&self, target: &Target, flags: MountFlags) -> Result<()> {
        target.ensure_directory()?;
        target.bind_mount(self.fd.as_fd(), flags)
    }

    /// Returns `true` if the volume is published at `target` with these flags. Returns an error if something else is
    /// mounted there, or the volume with other flags.
    pub(super) fn is_published(&self, target: &Target, requested: MountFlags) -> Result<bool> {
        let Some(mount) = target.mount()? else { return Ok(false) };
        if !target.status()?.is_some_and(|status| self.matches(&status)) {
            return Err(target.conflict("it is a mount point of something else").with_remedy("unmount it"));
        }
        let present = flags_of(&mount);
        if present == requested {
            return Ok(true);
        }
        Err(published_differently(target, present, requested))
    }

    /// Returns a mount point of the directory among `mounts`, other than `except`.
    pub(super) fn published_at(&self, mounts: &[KnownMount], except: Option<&Target>) -> Option<PathBuf> {
        self.targets(mounts)
            .find(|place| except.is_none_or(|except| *place != except.path()))
            .map(Path::to_owned)
    }

    /// Returns the mount points of the directory among `mounts`.
    pub(super) fn targets<'a>(&'a self, mounts: &'a [KnownMount]) -> impl Iterator<Item = &'a Path> {
        // The fields of the mount table are compared first: a stat(2) on a mount of another program could hang if
        // its server does not respond.
        let candidates = mounts.iter().filter(|mount| {
            mount.device == self.identity.device && mount.root.file_name() == Some(&self.name)
        });
        let found =
            candidates.filter(|mount| stat(&mount.mount_point).is_ok_and(|status| self.matches(&status)));
        found.map(|mount| mount.mount_point.as_path())
    }
}

/// Returns the error that a volume is published at the target already, in another way than is requested.
pub(super) fn published_differently(
    target: &Target,
    present: impl fmt::Debug,
    requested: impl fmt::Debug,
) -> Error {
    let cause = format!("it is published there with {present:?}, but {requested:?} is requested");
    Error::new(ErrorKind::AlreadyExists, "publish the volume at", target.path().display(), cause)
        .with_remedy("unpublish it there first")
}

/// Returns the flags of a mount.
fn flags_of(mount: &mountinfo::Mount) -> MountFlags {
    let access_time = if mount.has_option("noatime") {
        AccessTime::Never
    } else if mount.has_option("relatime") {
        AccessTime::Relative
    } else {
        AccessTime::Strict
    };
    MountFlags {
        read_only: mount.has_option("ro"),
        nosuid: mount.has_option("nosuid"),
        nodev: mount.has_option("nodev"),
        noexec: mount.has_option("noexec"),
        access_time,
        nodiratime: mount.has_option("nodiratime"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("rw,relatime", MountFlags::default())]
    #[case("ro,nosuid,nodev,noexec,noatime,nodiratime", MountFlags {
        read_only: true, nosuid: true, nodev: true, noexec: true, access_time: AccessTime::Never, nodiratime: true,
    })]
    #[case("rw", MountFlags { access_time: AccessTime::Strict, ..MountFlags::default() })]
    fn the_mount_table_has_the_flags(#[case] options: &str, #[case] flags: MountFlags) {
        let table = format!("50 40 254:16 /volumes/a /target {options} - xfs /dev/vdb rw,prjquota\n");
        let mounts = mountinfo::parse(table.as_bytes()).unwrap();
        assert_eq!(flags_of(&mounts[0]), flags);
    }
}
