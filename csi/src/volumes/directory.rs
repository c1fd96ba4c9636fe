//! Filesystem volumes: the volume's directory is bind-mounted at the target.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use loopfs::DeviceNumber;
use loopfs::loop_device::BackingFile;
use loopfs::mount::{AccessTime, KnownMount, MountFlags, table as mountinfo};
use loopfs::volume_store::Volume;
use nix::sys::stat::{FileStat, stat};

use crate::error::{Error, Result};
use crate::target::Target;

/// The directory of a volume. Its identity is its device and inode number, not a path.
pub(crate) struct Directory {
    name: OsString,
    fd: OwnedFd,
    identity: BackingFile,
}

impl Directory {
    pub(crate) fn open(volume: &Volume) -> Result<Self> {
        let fd = volume.open_dir()?;
        let identity = BackingFile::of(&fd)?;
        Ok(Self { name: volume.id().as_str().into(), fd, identity })
    }

    /// Returns `true` if a path with this status is the directory.
    pub(crate) fn matches(&self, status: &FileStat) -> bool {
        let device = DeviceNumber::from_raw(status.st_dev);
        self.identity == BackingFile { device, inode: status.st_ino }
    }

    /// Bind-mounts the directory at the target with exactly these flags.
    pub(crate) fn publish(&self, target: &Target, flags: MountFlags) -> Result<()> {
        target.ensure_directory()?;
        target.bind_mount(self.fd.as_fd(), flags)
    }

    /// Returns `true` if the volume is published at `target` with these flags. Returns an error if something else is
    /// mounted there, or the volume with other flags.
    pub(crate) fn is_published(&self, target: &Target, requested: MountFlags) -> Result<bool> {
        let Some(mount) = target.mount()? else { return Ok(false) };
        if !target.status()?.is_some_and(|status| self.matches(&status)) {
            return Err(target.precondition_error("is a mount point of something else; unmount it"));
        }
        let present = flags_of(&mount);
        if present == requested {
            return Ok(true);
        }
        Err(Error::PublishedDifferently(format!(
            "the volume is published at {} with {present:?}, but {requested:?} is requested; unpublish it there first",
            target.path().display()
        )))
    }

    /// Returns a mount point of the directory among `mounts`, other than `except`.
    pub(crate) fn published_at(&self, mounts: &[KnownMount], except: Option<&Target>) -> Option<PathBuf> {
        let mut candidates = mounts.iter().filter(|mount| {
            // The fields of the mount table are compared first: a stat(2) on a mount of another program could hang if
            // its server does not respond.
            mount.device == self.identity.device
                && mount.root.file_name() == Some(&self.name)
                && except.is_none_or(|except| mount.mount_point != except.path())
        });
        let found =
            candidates.find(|mount| stat(&mount.mount_point).is_ok_and(|status| self.matches(&status)));
        found.map(|mount| mount.mount_point.clone())
    }
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
    fn mount_flags_are_read_from_the_mount_table(#[case] options: &str, #[case] flags: MountFlags) {
        let table = format!("50 40 254:16 /volumes/a /target {options} - xfs /dev/vdb rw,prjquota\n");
        let mounts = mountinfo::parse(table.as_bytes()).unwrap();
        assert_eq!(flags_of(&mounts[0]), flags);
    }
}
