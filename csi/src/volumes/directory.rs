//! Filesystem volumes: their directory, bind-mounted at the target.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use loopfs::{AccessTime, BackingFile, DeviceNumber, MountFlags, Volume, mountinfo};
use nix::sys::stat::{FileStat, major, minor, stat};

use crate::error::{Error, Result};
use crate::target::Target;

/// The directory of a volume, known by its device and inode and not by a path.
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

    /// Whether this is what a path with this status shows.
    pub(crate) fn is(&self, status: &FileStat) -> bool {
        let device = DeviceNumber { major: major(status.st_dev) as u32, minor: minor(status.st_dev) as u32 };
        self.identity == BackingFile { device, inode: status.st_ino }
    }

    /// Shows the directory at the target with exactly these flags.
    pub(crate) fn publish(&self, target: &Target, flags: MountFlags) -> Result<()> {
        target.ensure_directory()?;
        target.bind_mount(self.fd.as_fd(), flags)
    }

    /// Whether `target` shows this volume as requested. An error if it shows something else, or this otherwise.
    pub(crate) fn is_published(&self, target: &Target, requested: MountFlags) -> Result<bool> {
        let Some(mount) = target.mount()? else { return Ok(false) };
        if !target.status()?.is_some_and(|status| self.is(&status)) {
            return Err(target.refuse("is a mount point that shows something else; unmount it"));
        }
        let present = flags_of(&mount);
        if present == requested {
            return Ok(true);
        }
        Err(Error::PublishedDifferently(format!(
            "{} shows the volume with {present:?}, and {requested:?} is requested; unpublish it there first",
            target.path().display()
        )))
    }

    /// A mount point among `mounts`, other than `except`, that shows this directory.
    pub(crate) fn published_at(
        &self,
        mounts: &[mountinfo::Mount],
        except: Option<&Target>,
    ) -> Option<PathBuf> {
        let mut showing = mounts.iter().filter(|mount| {
            // What the table says first: a stat of somebody else's mount could hang on a server that has gone.
            mount.device == self.identity.device
                && mount.root.file_name() == Some(&self.name)
                && except.is_none_or(|except| mount.mount_point != except.path())
        });
        let shown = showing.find(|mount| stat(&mount.mount_point).is_ok_and(|status| self.is(&status)));
        shown.map(|mount| mount.mount_point.clone())
    }
}

/// The flags a mount has.
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
    fn flags_are_read_from_the_table(#[case] options: &str, #[case] flags: MountFlags) {
        let table = format!("50 40 254:16 /volumes/a /target {options} - xfs /dev/vdb rw,prjquota\n");
        let mounts = mountinfo::parse(table.as_bytes()).unwrap();
        assert_eq!(flags_of(&mounts[0]), flags);
    }
}
