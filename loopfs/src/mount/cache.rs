//! The mounts below a directory, for a process that asks for them often while there are thousands.
//!
//! The kernel writes a line of the mount table for each mount at each read. [`MountCache`] reads only the list of the ids
//! (listmount(2), Linux 6.8), which is some fifty times faster, and the status of the mounts whose id is new (statmount(2)). Such an
//! id is never used again, and the file system and the file at the root of a mount do not change while it exists.
//!
//! The whole list is read each time, and not only the part after the greatest known id: a mount gets its id when it is created,
//! and may be attached long after (open_tree(2)).

use std::borrow::Borrow;
use std::ffi::{CString, OsString};
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;

use super::table::{self, Mount};
use crate::error::{Context, Result};
use crate::sys::mount::{
    MOUNT_ATTR__ATIME, MOUNT_ATTR_NOATIME, MOUNT_ATTR_NODEV, MOUNT_ATTR_NODIRATIME, MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY,
};
use crate::sys::mount_ids::{self, MountStatus};
use crate::sys::statx;
use crate::units::DeviceNumber;

/// The number of ids that one call of listmount(2) returns.
const IDS_PER_CALL: usize = 1024;

/// The mounts at and below a directory, as they were at the last [`read`](Self::read).
#[derive(Debug)]
pub struct MountCache {
    directory: PathBuf,
    /// All mounts of the namespace in the order of their ids. `None` for a mount that is not below the directory.
    known: Vec<(u64, Option<KnownMount>)>,
}

/// A mount. Copies share what is known of it.
#[derive(Clone, Debug)]
pub struct KnownMount(Arc<Known>);

#[derive(Debug)]
struct Known {
    mount: Mount,
    root: OnceLock<RootFile>,
}

/// The file that is the root of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RootFile {
    /// Its type and permissions (`st_mode`). The permissions may have changed since.
    pub mode: u32,
    /// The device of a device node (`st_rdev`).
    pub device: DeviceNumber,
}

impl MountCache {
    /// Returns a cache without mounts, for those at and below `directory`, which must be an absolute path without symbolic links.
    #[must_use]
    pub fn below(directory: PathBuf) -> Self {
        Self { directory, known: Vec::new() }
    }

    /// Returns the mounts of the mount namespace of this thread that are at or below the directory. Call it always in the same
    /// mount namespace.
    ///
    /// A mount point is where the mount was when this cache first saw it; a mount that was moved since keeps it. `source`,
    /// `propagation` and `super_options` are empty, and `options` has only flags, because statmount(2) returns no more on Linux
    /// 6.8. Where the kernel or a seccomp filter refuses the calls, this reads the whole table, which has these fields.
    ///
    /// # Errors
    /// ENOENT where `/proc` is not mounted, and the kernel refuses the calls.
    #[doc(alias = "listmount")]
    #[doc(alias = "statmount")]
    pub fn read(&mut self) -> Result<Vec<KnownMount>> {
        match self.refresh() {
            Ok(()) => Ok(self.known.iter().filter_map(|(_, mount)| mount.clone()).collect()),
            // ENOSYS: Linux before 6.8. EPERM: a seccomp filter, or a root directory that does not see the namespace's.
            // EOVERFLOW: a path of more than two pages. ENODATA: a kernel without a field.
            Err(Errno::ENOSYS | Errno::EPERM | Errno::EOVERFLOW | Errno::ENODATA) => {
                let mut mounts = table::read()?;
                mounts.retain(|mount| mount.mount_point.starts_with(&self.directory));
                Ok(mounts.into_iter().map(KnownMount::from).collect())
            }
            Err(errno) => Err(errno).context("list the mounts below", self.directory.display()),
        }
    }

    /// Makes the known mounts those that exist now.
    fn refresh(&mut self) -> Result<(), Errno> {
        let listed = listed()?;
        let mut known = std::mem::take(&mut self.known).into_iter().peekable();
        let mut current = Vec::with_capacity(listed.len());
        for id in listed {
            while known.next_if(|(older, _)| *older < id).is_some() {}
            match known.next_if(|(same, _)| *same == id) {
                Some(same) => current.push(same),
                None => match mount_ids::status(id) {
                    Ok(status) => current.push((id, self.wanted(status))),
                    // It was unmounted in the meantime.
                    Err(Errno::ENOENT) => {}
                    Err(errno) => return Err(errno),
                },
            }
        }
        self.known = current;
        Ok(())
    }

    fn wanted(&self, status: MountStatus) -> Option<KnownMount> {
        let mount = mount_of(status);
        mount.mount_point.starts_with(&self.directory).then(|| mount.into())
    }
}

impl KnownMount {
    /// Returns the file that is the root of the mount. Its status is read once, with statx(2) at the mount point. Returns `None`
    /// while that path shows another mount, or nothing.
    ///
    /// The call may block if the file system's server does not respond, so do not call it for a network file system.
    #[must_use]
    pub fn root_file(&self) -> Option<RootFile> {
        if let Some(root) = self.0.root.get() {
            return Some(*root);
        }
        let path = CString::new(self.mount_point.as_os_str().as_bytes()).ok()?;
        let file = statx::mounted_file(&path).ok()?.filter(|file| file.mount == self.id)?;
        let (major, minor) = file.rdev;
        let root = RootFile { mode: file.mode, device: DeviceNumber { major, minor } };
        Some(*self.0.root.get_or_init(|| root))
    }
}

impl Deref for KnownMount {
    type Target = Mount;

    fn deref(&self) -> &Mount {
        &self.0.mount
    }
}

impl Borrow<Mount> for KnownMount {
    fn borrow(&self) -> &Mount {
        self
    }
}

impl From<Mount> for KnownMount {
    fn from(mount: Mount) -> Self {
        Self(Arc::new(Known { mount, root: OnceLock::new() }))
    }
}

/// Returns the ids of all mounts of the namespace in ascending order.
fn listed() -> Result<Vec<u64>, Errno> {
    let mut all = Vec::new();
    loop {
        let (count, last) = (all.len(), all.last().copied().unwrap_or_default());
        all.resize(count + IDS_PER_CALL, 0);
        let added = mount_ids::list(last, &mut all[count..])?;
        all.truncate(count + added);
        if added < IDS_PER_CALL {
            return Ok(all);
        }
    }
}

fn mount_of(status: MountStatus) -> Mount {
    let path = |bytes: Vec<u8>| PathBuf::from(OsString::from_vec(bytes));
    let (major, minor) = status.device;
    Mount {
        id: status.id.into(),
        parent: status.parent.into(),
        device: DeviceNumber { major, minor },
        root: path(status.root),
        mount_point: path(status.mount_point),
        options: options(status.attributes).map(str::to_owned).collect(),
        propagation: Vec::new(),
        fs_type: String::from_utf8_lossy(&status.fs_type).into_owned(),
        source: PathBuf::new(),
        super_options: Vec::new(),
    }
}

/// Returns the flags of a mount by their names in the table.
fn options(attributes: u64) -> impl Iterator<Item = &'static str> {
    let has = move |flag: u32| attributes & u64::from(flag) != 0;
    let relatime = attributes & u64::from(MOUNT_ATTR__ATIME) == 0;
    [
        (true, if has(MOUNT_ATTR_RDONLY) { "ro" } else { "rw" }),
        (has(MOUNT_ATTR_NOSUID), "nosuid"),
        (has(MOUNT_ATTR_NODEV), "nodev"),
        (has(MOUNT_ATTR_NOEXEC), "noexec"),
        (has(MOUNT_ATTR_NOATIME), "noatime"),
        (has(MOUNT_ATTR_NODIRATIME), "nodiratime"),
        (relatime, "relatime"),
    ]
    .into_iter()
    .filter_map(|(is_set, name)| is_set.then_some(name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn cache_and_table_have_equal_mounts() {
        let places = |mounts: &mut dyn Iterator<Item = &Mount>| {
            let place =
                |mount: &Mount| (mount.id, mount.device, mount.root.clone(), mount.mount_point.clone());
            mounts.map(place).collect::<BTreeSet<_>>()
        };
        let mut cache = MountCache::below(Path::new("/").to_owned());
        for _ in 0..2 {
            let (cached, table) = loop {
                let before = table::read().unwrap();
                let cached = cache.read().unwrap();
                // Other processes mount, too.
                if table::read().unwrap() == before {
                    break (cached, before);
                }
            };
            assert_eq!(places(&mut cached.iter().map(Deref::deref)), places(&mut table.iter()));
        }
    }

    #[test]
    fn flag_names_match_the_mount_table() {
        let flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOATIME;
        assert_eq!(options(flags.into()).collect::<Vec<_>>(), ["ro", "nodev", "noatime"]);
        assert_eq!(options(0).collect::<Vec<_>>(), ["rw", "relatime"]);
    }

    /// The path leads to the mount on top, so the root found there would be the wrong file.
    #[test]
    fn a_covered_mount_has_no_root() {
        let mounts = table::read().unwrap();
        let proc = table::at(&mounts, Path::new("/proc")).unwrap().clone();
        let directory = KnownMount::from(proc.clone()).root_file().unwrap();
        assert_eq!(directory.mode & libc::S_IFMT, libc::S_IFDIR);
        let covered = Mount { id: u64::MAX, ..proc };
        assert_eq!(KnownMount::from(covered).root_file(), None);
    }
}
