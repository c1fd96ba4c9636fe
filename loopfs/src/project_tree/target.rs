//! The target tree of a clone. No other process can reach it, so names and `..` do not change during the walk.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{
    FchmodatFlags, FileStat, Mode, SFlag, UtimensatFlags, fchmodat, fstat, mkdirat, mknodat, utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, linkat, symlinkat, unlinkat};

use super::flags::{ALLOCATION, FREEZING, Flags};
use super::inode::{AttributeAccess, Inode, InodeKind, open_directory};
use super::xattrs;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::reflink;
use crate::sys::file_handle::{self, FileHandle};
use crate::sys::getdents;

/// An operation on an inode that the kernel refused, and its errno.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpError {
    pub(super) operation: &'static str,
    pub(super) errno: Errno,
}

pub(super) const SHARE: &str = "share the content of";
pub(super) const RECORD_LINKS: &str = "record the hard links of";

pub(super) trait OpContext<T> {
    fn during(self, operation: &'static str) -> Result<T, OpError>;
}

impl<T> OpContext<T> for Result<T, Errno> {
    fn during(self, operation: &'static str) -> Result<T, OpError> {
        self.map_err(|errno| OpError { operation, errno })
    }
}

impl From<Errno> for OpError {
    fn from(errno: Errno) -> Self {
        Self { operation: "find the copy of", errno }
    }
}

/// The target tree, with the directory that is being filled.
pub(super) struct TargetTree {
    root: OwnedFd,
    here: OwnedFd,
    /// For each directory from the root to `here`, the status of its source and the flags. Its times and flags are set once it is
    /// full: filling it would change the times, and flags could prevent filling it.
    levels: Vec<(FileStat, Flags)>,
    attributes: AttributeAccess,
}

impl TargetTree {
    /// Opens the target tree. `root` must be an empty directory.
    pub(super) fn open(root: BorrowedFd<'_>) -> Result<Self> {
        const TARGET: &str = "the directory to clone into";
        let root = open_directory(root, c".").context("open", TARGET)?;
        let names = getdents::read(&root).context("list", TARGET)?;
        if names.iter().any(|entry| !matches!(entry.name.as_bytes(), b"." | b"..")) {
            return Err(Error::new(ErrorKind::AlreadyExists, "clone into", TARGET, "it is not empty"));
        }
        let here = root.try_clone().context("open", TARGET)?;
        Ok(Self { root, here, levels: Vec::new(), attributes: AttributeAccess::new()? })
    }

    /// Returns `true` if `status` is that of the root.
    pub(super) fn is_root(&self, status: &FileStat) -> bool {
        fstat(&self.root).is_ok_and(|root| (root.st_dev, root.st_ino) == (status.st_dev, status.st_ino))
    }

    /// Creates a file without a name, which the kernel removes when it is closed. It is in no project, because the clone may need
    /// all of its limit.
    pub(super) fn unnamed_file(&self) -> Result<File, OpError> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let file = openat(&self.root, c".", flags, Mode::S_IRUSR | Mode::S_IWUSR).during(RECORD_LINKS)?;
        let status = fstat(&file).during(RECORD_LINKS)?;
        let inode = Inode::other(&self.attributes, &file, &status).during(RECORD_LINKS)?;
        match inode.project().during(RECORD_LINKS)? {
            Some(project) if project.id() != 0 => inode.set(&project.with(0, false)).during(RECORD_LINKS)?,
            _ => {}
        }
        drop(inode);
        Ok(File::from(file))
    }

    /// Returns `true` if every directory that was entered was left again.
    pub(super) fn is_finished(&self) -> bool {
        self.levels.is_empty()
    }

    /// Copies the attributes of the source to the root. New entries inherit only the project of the root.
    pub(super) fn enter_root(
        &mut self,
        source: &Inode<'_>,
        status: &FileStat,
        flags: Flags,
    ) -> Result<(), OpError> {
        self.set_flags(&Inode::directory(&self.root), Flags::default())?;
        self.copy_attributes(source, status, &self.root)?;
        // The caller still has to move the root to its final place.
        self.levels.push((*status, flags.without(FREEZING)));
        Ok(())
    }

    pub(super) fn enter_directory(
        &mut self,
        name: &CStr,
        source: &Inode<'_>,
        status: &FileStat,
        flags: Flags,
    ) -> Result<(), OpError> {
        mkdirat(&self.here, name, Mode::S_IRWXU).during("make")?;
        let made = self.or_remove(name, UnlinkatFlags::RemoveDir, || {
            let made = open_directory(self.here.as_fd(), name).during("open the copy of")?;
            self.copy_attributes(source, status, &made)?;
            Ok(made)
        })?;
        self.here = made;
        self.levels.push((*status, flags));
        Ok(())
    }

    /// Sets the times and flags of the current directory and returns to its parent. On error, the directory lacks its times or
    /// flags, but its content is complete.
    pub(super) fn leave_directory(&mut self) -> Result<(), OpError> {
        let Some((status, flags)) = self.levels.pop() else { return Ok(()) };
        let finished = self
            .set_times(&self.here, &status)
            .and_then(|()| self.set_flags(&Inode::directory(&self.here), flags));
        if !self.levels.is_empty() {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            self.here = openat(&self.here, "..", flags, Mode::empty()).during("return from")?;
        }
        finished
    }

    /// Creates the copy of an entry that is not a directory. `flags` must not contain [`FREEZING`] flags if the copy is to get
    /// further hard links.
    pub(super) fn make(
        &self,
        name: &CStr,
        source: &Inode<'_>,
        status: &FileStat,
        flags: Flags,
    ) -> Result<OwnedFd, OpError> {
        let made = if source.kind == InodeKind::File {
            let create =
                OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            openat(&self.here, name, create, Mode::S_IRUSR | Mode::S_IWUSR).during("make")?
        } else {
            self.make_special(name, source, status)?
        };
        self.or_remove(name, UnlinkatFlags::NoRemoveDir, || {
            if source.kind == InodeKind::File && flags.has_any(ALLOCATION) {
                self.set_flags_of(&made, flags.only(ALLOCATION))?;
            }
            if source.kind == InodeKind::File && status.st_size > 0 {
                let content = source.open_file().during("open")?;
                reflink::share_content(content.as_fd(), made.as_fd()).during(SHARE)?;
            }
            self.copy_attributes(source, status, &made)?;
            self.set_times(&made, status)?;
            // The root passes on no other flags, so there are none to clear.
            if !flags.are_none() {
                self.set_flags_of(&made, flags)?;
            }
            Ok(())
        })?;
        Ok(made)
    }

    fn make_special(&self, name: &CStr, source: &Inode<'_>, status: &FileStat) -> Result<OwnedFd, OpError> {
        if source.kind == InodeKind::Symlink {
            let destination = readlinkat(source.held, c"").during("read")?;
            symlinkat(destination.as_os_str(), &self.here, name).during("make")?;
        } else {
            let kind = SFlag::from_bits_truncate(status.st_mode & libc::S_IFMT);
            mknodat(&self.here, name, kind, Mode::S_IRUSR | Mode::S_IWUSR, status.st_rdev).during("make")?;
        }
        self.or_remove(name, UnlinkatFlags::NoRemoveDir, || {
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            openat(&self.here, name, flags, Mode::empty()).during("open the copy of")
        })
    }

    /// Creates another hard link to a file of the tree.
    pub(super) fn link(&self, name: &CStr, made: &FileHandle) -> Result<(), OpError> {
        let held = file_handle::open(&self.root, made).during("find the copy of")?;
        let (links, link) = (self.attributes.links(), AttributeAccess::link(&held));
        linkat(links, link.as_c_str(), &self.here, name, AtFlags::AT_SYMLINK_FOLLOW)
            .during("link the copy of")
    }

    /// Sets the flags of a file that has all its hard links.
    pub(super) fn freeze(&self, made: &FileHandle, flags: Flags) -> Result<(), OpError> {
        self.set_flags_of(&file_handle::open(&self.root, made).during("find the copy of")?, flags)
    }

    /// Copies the owner first, because a change of the owner clears capabilities and mode bits. An ACL also sets the group bits
    /// of the mode, so the mode comes last.
    fn copy_attributes(&self, source: &Inode<'_>, status: &FileStat, made: &OwnedFd) -> Result<(), OpError> {
        let (links, link) = (self.attributes.links(), AttributeAccess::link(made));
        let (owner, group) = (Uid::from_raw(status.st_uid), Gid::from_raw(status.st_gid));
        fchownat(links, link.as_c_str(), Some(owner), Some(group), AtFlags::empty())
            .during("give the copy to the owner of")?;
        xattrs::copy_attributes(&AttributeAccess::path(source.held), &AttributeAccess::path(made))
            .during("copy the extended attributes of")?;
        if source.kind != InodeKind::Symlink {
            let mode = Mode::from_bits_truncate(status.st_mode & 0o7777);
            fchmodat(links, link.as_c_str(), mode, FchmodatFlags::FollowSymlink)
                .during("copy the mode of")?;
        }
        Ok(())
    }

    fn set_times(&self, made: &OwnedFd, status: &FileStat) -> Result<(), OpError> {
        let (links, link) = (self.attributes.links(), AttributeAccess::link(made));
        let accessed = TimeSpec::new(status.st_atime, status.st_atime_nsec);
        let modified = TimeSpec::new(status.st_mtime, status.st_mtime_nsec);
        utimensat(links, link.as_c_str(), &accessed, &modified, UtimensatFlags::FollowSymlink)
            .during("copy the times of")
    }

    fn set_flags_of(&self, made: &OwnedFd, flags: Flags) -> Result<(), OpError> {
        let inode = fstat(made)
            .and_then(|status| Inode::other(&self.attributes, made, &status))
            .during("open the copy of")?;
        self.set_flags(&inode, flags)
    }

    fn set_flags(&self, made: &Inode<'_>, flags: Flags) -> Result<(), OpError> {
        const OPERATION: &str = "copy the flags of";
        let Some(now) = made.project().during(OPERATION)? else { return Ok(()) };
        if now.flags() == flags { Ok(()) } else { made.set(&now.with_flags(flags)).during(OPERATION) }
    }

    /// Removes an entry that could not be completed.
    fn or_remove<T>(
        &self,
        name: &CStr,
        sort: UnlinkatFlags,
        make: impl FnOnce() -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        make().or_else(|refusal| {
            unlinkat(&self.here, name, sort).during("remove the copy of")?;
            Err(refusal)
        })
    }
}
