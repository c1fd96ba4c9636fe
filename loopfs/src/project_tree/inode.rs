//! One inode of a tree. A descriptor holds it while it is processed, so renames and deletions of its name do not matter.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{FileStat, Mode, fstat};

use super::flags::{CHOSEN, Flags};
use crate::error::{Context, Result};
use crate::sys::fsxattr::{self, FS_XFLAG_PROJINHERIT};
use crate::sys::{file_attr, generation};

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
    Directory(BorrowedFd<'a>),
    /// Before Linux 6.17: a regular file, which can be opened without side effects.
    Open(OwnedFd),
    /// From Linux 6.17 on: any inode that is not a directory.
    Link {
        links: BorrowedFd<'a>,
        held: &'a OwnedFd,
    },
    /// Before Linux 6.17: a special file or symbolic link, whose attributes cannot be accessed.
    OutOfReach,
}

impl<'a> Inode<'a> {
    /// Creates the inode of a directory that is open for reading.
    pub(super) fn directory(directory: &'a OwnedFd) -> Self {
        let held = directory.as_fd();
        Self { kind: InodeKind::Directory, links: 1, held, access: InodeAccess::Directory(held) }
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
            InodeAccess::Link { links: attributes.links.as_fd(), held }
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
    pub(super) fn open_file(&self) -> std::result::Result<Reading<'_>, Errno> {
        let InodeAccess::Link { links, held } = &self.access else {
            return match &self.access {
                InodeAccess::Open(file) => Ok(Reading::Borrowed(file.as_fd())),
                _ => Err(Errno::EBADF),
            };
        };
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let open = |flags| {
            openat(links, AttributeAccess::link(*held).as_c_str(), flags, Mode::empty()).map(Reading::Owned)
        };
        match open(flags | OFlag::O_NOATIME) {
            Err(Errno::EPERM) => open(flags),
            other => other,
        }
    }

    /// Returns its project id, or `None` if this kernel or file system cannot read it for this type of inode.
    pub(super) fn project(&self) -> std::result::Result<Option<InodeProject>, Errno> {
        let stored = match &self.access {
            InodeAccess::Directory(directory) => Stored::Open(fsxattr::get(directory)?),
            InodeAccess::Open(file) => Stored::Open(fsxattr::get(file)?),
            InodeAccess::Link { links, held } => match file_attr::get(links, &AttributeAccess::link(*held)) {
                Err(Errno::EOPNOTSUPP | Errno::ENOTTY) if self.kind != InodeKind::File => return Ok(None),
                read => Stored::Path(read?),
            },
            InodeAccess::OutOfReach => return Ok(None),
        };
        Ok(Some(InodeProject { stored }))
    }

    /// Writes the attributes of `project` to the inode. Attributes that [`InodeProject`] did not change keep the values that were
    /// read.
    pub(super) fn set(&self, project: &InodeProject) -> std::result::Result<(), Errno> {
        match (&self.access, &project.stored) {
            (InodeAccess::Directory(directory), Stored::Open(stored)) => fsxattr::set(directory, stored),
            (InodeAccess::Open(file), Stored::Open(stored)) => fsxattr::set(file, stored),
            (InodeAccess::Link { links, held }, Stored::Path(stored)) => {
                file_attr::set(links, &AttributeAccess::link(*held), stored)
            }
            _ => Err(Errno::EOPNOTSUPP),
        }
    }
}

/// A file open for reading.
pub(super) enum Reading<'a> {
    Borrowed(BorrowedFd<'a>),
    Owned(OwnedFd),
}

impl AsFd for Reading<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Borrowed(file) => *file,
            Self::Owned(file) => file.as_fd(),
        }
    }
}

/// The project of an inode, with the attributes that are written along with it.
#[derive(Clone, Copy)]
pub(super) struct InodeProject {
    stored: Stored,
}

#[derive(Clone, Copy)]
enum Stored {
    Open(fsxattr::fsxattr),
    Path(file_attr::file_attr),
}

impl InodeProject {
    pub(super) fn id(&self) -> u32 {
        match &self.stored {
            Stored::Open(stored) => stored.fsx_projid,
            Stored::Path(stored) => stored.fa_projid,
        }
    }

    /// Returns `true` if new files in the directory inherit its id.
    pub(super) fn inherits(&self) -> bool {
        match &self.stored {
            Stored::Open(stored) => stored.fsx_xflags & FS_XFLAG_PROJINHERIT != 0,
            Stored::Path(stored) => stored.fa_xflags & u64::from(FS_XFLAG_PROJINHERIT) != 0,
        }
    }

    pub(super) fn flags(&self) -> Flags {
        match &self.stored {
            Stored::Open(stored) => {
                Flags::new(stored.fsx_xflags.into(), stored.fsx_extsize, stored.fsx_cowextsize)
            }
            Stored::Path(stored) => Flags::new(stored.fa_xflags, stored.fa_extsize, stored.fa_cowextsize),
        }
    }

    /// Returns a copy with the flags of the owner replaced and the project unchanged.
    pub(super) fn with_flags(mut self, flags: Flags) -> Self {
        match &mut self.stored {
            Stored::Open(stored) => {
                stored.fsx_xflags = stored.fsx_xflags & !CHOSEN | flags.bits();
                (stored.fsx_extsize, stored.fsx_cowextsize) = flags.hints();
            }
            Stored::Path(stored) => {
                stored.fa_xflags = stored.fa_xflags & !u64::from(CHOSEN) | u64::from(flags.bits());
                (stored.fa_extsize, stored.fa_cowextsize) = flags.hints();
            }
        }
        self
    }

    pub(super) fn with(mut self, id: u32, inherits: bool) -> Self {
        let flag = |set: bool| if set { FS_XFLAG_PROJINHERIT } else { 0 };
        match &mut self.stored {
            Stored::Open(stored) => {
                stored.fsx_projid = id;
                stored.fsx_xflags = stored.fsx_xflags & !FS_XFLAG_PROJINHERIT | flag(inherits);
            }
            Stored::Path(stored) => {
                stored.fa_projid = id;
                stored.fa_xflags =
                    stored.fa_xflags & !u64::from(FS_XFLAG_PROJINHERIT) | u64::from(flag(inherits));
            }
        }
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
        let project = InodeProject { stored: Stored::Open(read) };
        assert_eq!((project.id(), project.inherits()), (3, false));
        let changed = project.with(9, true);
        assert_eq!((changed.id(), changed.inherits()), (9, true));
        let Stored::Open(back) = changed.with(3, false).stored else { panic!("another form") };
        assert_eq!((back.fsx_xflags, back.fsx_projid, back.fsx_extsize), (0x8000_0008, 3, 1));
        let read = file_attr::file_attr {
            fa_xflags: 1 << 40,
            fa_extsize: 1,
            fa_nextents: 2,
            fa_projid: 3,
            fa_cowextsize: 4,
        };
        let changed = InodeProject { stored: Stored::Path(read) }.with(9, true);
        assert_eq!((changed.id(), changed.inherits()), (9, true));
        let Stored::Path(back) = changed.with(3, false).stored else { panic!("another form") };
        assert_eq!((back.fa_xflags, back.fa_projid, back.fa_cowextsize), (1 << 40, 3, 4));
    }
}
