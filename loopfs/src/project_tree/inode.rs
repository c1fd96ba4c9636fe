//! One inode of a tree. A descriptor holds it while it is processed, so renames and deletions of its name do not matter.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{FileStat, Mode, fstat};

use super::flags::{CHOSEN, Flags};
use crate::descriptor::reopen;
use crate::error::{Context, Result};
use crate::sys::fsxattr::{self, FS_XFLAG_PROJINHERIT};
use crate::sys::{file_attr, generation};

const INHERIT: u64 = FS_XFLAG_PROJINHERIT as u64;

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InodeKind {
    Directory,
    File,
    Symlink,
    /// A socket, FIFO or device.
    Special,
}

impl InodeKind {
    pub(super) fn of(mode: libc::mode_t) -> Self {
        match mode & libc::S_IFMT {
            libc::S_IFDIR => Self::Directory,
            libc::S_IFREG => Self::File,
            libc::S_IFLNK => Self::Symlink,
            _ => Self::Special,
        }
    }
}

/// The identity of a directory among all directories that ever existed: the inode number of a removed one is soon reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectoryIdentity {
    device: libc::dev_t,
    inode: libc::ino_t,
    generation: Option<libc::c_long>,
}

impl DirectoryIdentity {
    pub(super) fn of(directory: &OwnedFd) -> std::result::Result<Self, Errno> {
        let status = fstat(directory)?;
        let generation = match generation::get(directory) {
            Ok(generation) => Some(generation),
            Err(Errno::ENOTTY | Errno::EOPNOTSUPP) => None,
            Err(errno) => return Err(errno),
        };
        Ok(Self { device: status.st_dev, inode: status.st_ino, generation })
    }
}

/// Opens an entry of a directory. It follows no symbolic link, and returns EXDEV if the entry is on another mount.
pub(super) fn open_entry(
    directory: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlag,
) -> std::result::Result<OwnedFd, Errno> {
    let resolve =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    openat2(directory, name, OpenHow::new().flags(flags).resolve(resolve))
}

/// Opens a directory for reading, with `O_NOATIME` if the caller is permitted to use it.
pub(super) fn open_directory(directory: BorrowedFd<'_>, name: &CStr) -> std::result::Result<OwnedFd, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    match open_entry(directory, name, flags | OFlag::O_NOATIME) {
        Err(Errno::EPERM) => open_entry(directory, name, flags),
        other => other,
    }
}

/// Opens the parent directory if it is on the same mount, with `O_NOATIME` if the caller is permitted to use it.
pub(super) fn open_parent(directory: &OwnedFd) -> std::result::Result<OwnedFd, Errno> {
    let resolve = ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let open = |flags| openat2(directory, c"..", OpenHow::new().flags(flags).resolve(resolve));
    match open(flags | OFlag::O_NOATIME) {
        Err(Errno::EPERM) => open(flags),
        other => other,
    }
}

const LINKS: &str = "/proc/thread-self/fd";

/// The method by which this kernel gives access to the attributes of inodes that are not open.
///
/// An entry is first opened with `O_PATH`, which has no side effects on the inode, and its status is read. From then on it is
/// accessed by the link of that descriptor in proc(5), never by its name, which may refer to another inode by then.
pub(super) struct AttributeAccess {
    links: OwnedFd,
    by_path: bool,
}

impl AttributeAccess {
    /// Opens the directory of links in proc(5).
    ///
    /// # Errors
    /// ENOENT: proc(5) is not mounted on /proc.
    pub(super) fn new() -> Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let links = open(LINKS, flags, Mode::empty())
            .context("open", LINKS)
            .map_err(|error| error.with_remedy("proc(5) must be mounted on /proc"))?;
        Ok(Self { links, by_path: file_attr::exists() })
    }

    /// Returns the directory of the links, for calls that take a directory and a name in it.
    pub(super) fn links(&self) -> BorrowedFd<'_> {
        self.links.as_fd()
    }

    /// Returns the name of the link to the held inode.
    pub(super) fn link(held: impl AsFd) -> CString {
        let digits = held.as_fd().as_raw_fd().to_string();
        CString::new(digits).unwrap_or_default()
    }

    /// Returns the path of the link to the held inode, for calls that take only a path. The path leads to the inode itself, even
    /// if that is a symbolic link.
    pub(super) fn path(held: impl AsFd) -> CString {
        let path = format!("{LINKS}/{}", held.as_fd().as_raw_fd());
        CString::new(path).unwrap_or_default()
    }
}

/// An inode of the tree, held by a descriptor.
pub(super) struct Inode<'a> {
    pub(super) kind: InodeKind,
    /// Number of hard links.
    pub(super) links: u64,
    /// The descriptor by which it is held: `O_PATH` unless it is a directory.
    pub(super) held: BorrowedFd<'a>,
    access: InodeAccess<'a>,
}

enum InodeAccess<'a> {
    /// A directory, which is held open.
    Directory,
    /// Before Linux 6.17: a regular file, which can be opened without side effects.
    Open(OwnedFd),
    /// From Linux 6.17 on: any inode that is not a directory, by its link in this directory.
    Link(BorrowedFd<'a>),
    /// Before Linux 6.17: a special file or symbolic link, whose attributes cannot be accessed.
    OutOfReach,
}

impl<'a> Inode<'a> {
    /// Creates the inode of a directory that is open for reading.
    pub(super) fn directory(directory: &'a OwnedFd) -> Self {
        let held = directory.as_fd();
        Self { kind: InodeKind::Directory, links: 1, held, access: InodeAccess::Directory }
    }

    /// Creates an inode that is not a directory, held by an `O_PATH` descriptor. A regular file is opened with `O_NONBLOCK`,
    /// because its owner could have a lease on it (fcntl(2)). The call then returns EAGAIN instead of blocking.
    pub(super) fn other(
        attributes: &'a AttributeAccess,
        held: &'a OwnedFd,
        status: &FileStat,
    ) -> std::result::Result<Self, Errno> {
        let kind = InodeKind::of(status.st_mode);
        let access = if attributes.by_path {
            InodeAccess::Link(attributes.links())
        } else if kind == InodeKind::File {
            let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
            let link = AttributeAccess::link(held);
            InodeAccess::Open(openat(&attributes.links, link.as_c_str(), flags, Mode::empty())?)
        } else {
            InodeAccess::OutOfReach
        };
        #[allow(clippy::unnecessary_cast, reason = "st_nlink is 32 bits wide on aarch64")]
        Ok(Self { kind, links: status.st_nlink as u64, held: held.as_fd(), access })
    }

    /// Opens a regular file for reading, with `O_NOATIME` if the caller is permitted to use it. Returns EAGAIN if its owner has
    /// a lease on it.
    pub(super) fn open_file(&self) -> std::result::Result<OwnedFd, Errno> {
        if self.kind != InodeKind::File {
            return Err(Errno::EBADF);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        match reopen(self.held, flags | OFlag::O_NOATIME) {
            Err(Errno::EPERM) => reopen(self.held, flags),
            other => other,
        }
    }

    /// Returns its project id, or `None` if this kernel or file system cannot read it for this type of inode.
    pub(super) fn project(&self) -> std::result::Result<Option<InodeProject>, Errno> {
        let attributes = match &self.access {
            InodeAccess::Directory => common(&fsxattr::get(self.held)?),
            InodeAccess::Open(file) => common(&fsxattr::get(file)?),
            InodeAccess::Link(links) => match file_attr::get(links, &AttributeAccess::link(self.held)) {
                Err(Errno::EOPNOTSUPP | Errno::ENOTTY) if self.kind != InodeKind::File => return Ok(None),
                read => read?,
            },
            InodeAccess::OutOfReach => return Ok(None),
        };
        Ok(Some(InodeProject(attributes)))
    }

    /// Writes the attributes of `project` to the inode. Attributes that [`InodeProject`] did not change keep the values that were
    /// read.
    pub(super) fn set(&self, project: &InodeProject) -> std::result::Result<(), Errno> {
        match &self.access {
            InodeAccess::Directory => fsxattr::set(self.held, &for_ioctl(&project.0)),
            InodeAccess::Open(file) => fsxattr::set(file, &for_ioctl(&project.0)),
            InodeAccess::Link(links) => file_attr::set(links, &AttributeAccess::link(self.held), &project.0),
            InodeAccess::OutOfReach => Err(Errno::EOPNOTSUPP),
        }
    }
}

/// Returns what `FS_IOC_FSGETXATTR` has read in the form of file_getattr(2).
fn common(read: &fsxattr::fsxattr) -> file_attr::file_attr {
    file_attr::file_attr {
        fa_xflags: read.fsx_xflags.into(),
        fa_extsize: read.fsx_extsize,
        fa_nextents: read.fsx_nextents,
        fa_projid: read.fsx_projid,
        fa_cowextsize: read.fsx_cowextsize,
    }
}

/// Returns what `FS_IOC_FSSETXATTR` writes. Its flags have 32 bits, as those that [`common`] has converted.
fn for_ioctl(attributes: &file_attr::file_attr) -> fsxattr::fsxattr {
    fsxattr::fsxattr {
        fsx_xflags: attributes.fa_xflags as u32,
        fsx_extsize: attributes.fa_extsize,
        fsx_nextents: attributes.fa_nextents,
        fsx_projid: attributes.fa_projid,
        fsx_cowextsize: attributes.fa_cowextsize,
        fsx_pad: [0; 8],
    }
}

/// The project of an inode, with the attributes that are written along with it.
#[derive(Clone, Copy)]
pub(super) struct InodeProject(file_attr::file_attr);

impl InodeProject {
    pub(super) fn id(&self) -> u32 {
        self.0.fa_projid
    }

    /// Returns `true` if new files in the directory inherit its id.
    pub(super) fn inherits(&self) -> bool {
        self.0.fa_xflags & INHERIT != 0
    }

    pub(super) fn flags(&self) -> Flags {
        Flags::new(self.0.fa_xflags, self.0.fa_extsize, self.0.fa_cowextsize)
    }

    /// Returns a copy with the flags of the owner replaced and the project unchanged.
    pub(super) fn with_flags(mut self, flags: Flags) -> Self {
        self.0.fa_xflags = self.0.fa_xflags & !u64::from(CHOSEN) | u64::from(flags.bits());
        (self.0.fa_extsize, self.0.fa_cowextsize) = flags.hints();
        self
    }

    pub(super) fn with(mut self, id: u32, inherits: bool) -> Self {
        self.0.fa_projid = id;
        self.0.fa_xflags = self.0.fa_xflags & !INHERIT | if inherits { INHERIT } else { 0 };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changing_projects_keeps_other_attributes() {
        let read = fsxattr::fsxattr {
            fsx_xflags: 0x8000_0008,
            fsx_extsize: 1,
            fsx_nextents: 2,
            fsx_projid: 3,
            fsx_cowextsize: 4,
            fsx_pad: [0; 8],
        };
        let project = InodeProject(common(&read));
        assert_eq!((project.id(), project.inherits()), (3, false));
        let changed = project.with(9, true);
        assert_eq!((changed.id(), changed.inherits()), (9, true));
        let back = for_ioctl(&changed.with(3, false).0);
        assert_eq!((back.fsx_xflags, back.fsx_projid), (0x8000_0008, 3));
        assert_eq!((back.fsx_extsize, back.fsx_nextents, back.fsx_cowextsize), (1, 2, 4));
        // Only file_setattr(2) has flags above bit 31.
        let project = InodeProject(file_attr::file_attr { fa_xflags: 1 << 40, ..common(&read) });
        assert_eq!(project.with(9, true).with(3, false).0.fa_xflags, 1 << 40);
    }
}
