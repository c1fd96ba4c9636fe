//! The on-disk layout, and the only code that names entries of it.
//!
//! ```text
//! .loopfs/format         "loopfs store 1"; made last at initialisation
//! .loopfs/lock           flock: shared by changes, exclusive for recovery
//! .loopfs/promised       flock: the account of promised bytes
//! .loopfs/project-ids    flock: one allocation of a project id at a time
//! .loopfs/users/ID       a link: in which boot the directory ID was shown, and where; flock of publications: changes
//! volumes/ID             a directory (Filesystem) or a regular file (Block)
//! snapshots/ID           likewise, and never written to
//! staging/ID.SUFFIX      a directory being made, not yet a volume or snapshot
//! trash/ID.SUFFIX        a deleted volume or snapshot, until its space and project id are free
//! ```
//!
//! A volume is its entry in `volumes`, which a single rename or link makes appear complete; so is a snapshot.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, OFlag, OpenHow, RenameFlags, ResolveFlag, openat2, renameat2};
use nix::sys::stat::{FileStat, Mode, fstatat, futimens, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::fsync;

use super::boot::Boot;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock;
use crate::sys::random;
use crate::volume_store::source::ContentSource;

const FORMAT: &str = "loopfs store 1\n";
const PUBLICATIONS: &str = ".loopfs/users";

/// Directories of the store, held open; everything else is reached beneath them.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) private: OwnedFd,
    pub(crate) volumes: OwnedFd,
    /// None in a store of an earlier version that was opened to look at, or is read-only.
    pub(crate) snapshots: Option<OwnedFd>,
    /// As `snapshots`.
    pub(crate) publications: Option<OwnedFd>,
    pub(crate) staging: OwnedFd,
    pub(crate) trash: OwnedFd,
    pub(crate) boot: Boot,
    /// How long to wait for each lock of the store.
    pub(crate) lock_timeout: Duration,
}

impl Layout {
    /// Whether the file system holds a store. An unknown format is an error.
    pub(crate) fn is_initialised(root: BorrowedFd<'_>) -> Result<bool> {
        let format = match open_beneath(root, ".loopfs/format", OFlag::O_RDONLY) {
            Ok(format) => format,
            Err(Errno::ENOENT) => return Ok(false),
            Err(errno) => return Err(Error::sys("open", ".loopfs/format", errno)),
        };
        let mut text = [0u8; 64];
        let length = nix::unistd::read(&format, &mut text).context("read", ".loopfs/format")?;
        match &text[..length] {
            found if found == FORMAT.as_bytes() => Ok(true),
            found => {
                let detail =
                    format!("{:?} is not a format this version knows", String::from_utf8_lossy(found));
                Err(Error::new(ErrorKind::Unsupported, "open the store", ".loopfs/format", detail))
            }
        }
    }

    /// Makes what is missing. The format file comes last, so a half-made store is made again.
    pub(crate) fn initialise(root: BorrowedFd<'_>) -> Result<()> {
        for name in [".loopfs", PUBLICATIONS, "volumes", "snapshots", "staging", "trash"] {
            make_directory(root, name)?;
        }
        let private = open_directory(root, ".loopfs")?;
        for name in ["lock", "project-ids", "promised"] {
            open_file(&private, name, OFlag::O_RDWR | OFlag::O_CREAT)?;
        }
        let temporary = open_file(&private, "format.new", OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC)?;
        nix::unistd::write(&temporary, FORMAT.as_bytes()).context("write", ".loopfs/format.new")?;
        fsync(&temporary).context("fsync", ".loopfs/format.new")?;
        renameat2(&private, "format.new", &private, "format", RenameFlags::empty())
            .context("make", ".loopfs/format")?;
        fsync(&private).context("fsync", ".loopfs")?;
        fsync(root).context("fsync", "the root of the store")
    }

    /// Makes what a store of an earlier version lacks. Where nothing can be made, nothing needs it.
    pub(crate) fn complete(root: BorrowedFd<'_>) -> Result<()> {
        let made = make_directory(root, "snapshots").and_then(|()| make_directory(root, PUBLICATIONS));
        match made {
            Err(error) if error.kind() == ErrorKind::ReadOnly => Ok(()),
            made => made,
        }
    }

    pub(crate) fn open(root: BorrowedFd<'_>, lock_timeout: Duration) -> Result<Self> {
        let open_if_there = |name| match open_directory(root, name) {
            Ok(directory) => Ok(Some(directory)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        Ok(Self {
            private: open_directory(root, ".loopfs")?,
            volumes: open_directory(root, "volumes")?,
            snapshots: open_if_there("snapshots")?,
            publications: open_if_there(PUBLICATIONS)?,
            staging: open_directory(root, "staging")?,
            trash: open_directory(root, "trash")?,
            boot: Boot::current()?,
            lock_timeout,
        })
    }

    /// Held while a volume is made, grown or deleted.
    pub(crate) fn lock_shared(&self) -> Result<Flock<OwnedFd>> {
        flock::shared(
            self.lock_file()?,
            self.lock_timeout,
            "change an entry of the store, which takes the lock",
        )
    }

    /// Held while nothing may be half done.
    pub(crate) fn lock_exclusive(&self) -> Result<Flock<OwnedFd>> {
        flock::exclusive(self.lock_file()?, self.lock_timeout, "recover the store, which takes the lock")
    }

    /// The lock file of [`ProjectIds`](crate::project_quota::ProjectIds).
    pub(crate) fn project_ids(&self) -> Result<OwnedFd> {
        open_file(&self.private, "project-ids", OFlag::O_RDONLY)
    }

    /// The files are never renamed or replaced: a waiter must not wake up holding a lock on a
    /// file that has no name any more.
    fn lock_file(&self) -> Result<OwnedFd> {
        open_file(&self.private, "lock", OFlag::O_RDWR)
    }

    /// Makes durable what was changed before the call, also where there is no file to fsync: a limit
    /// is in the file system's log, which nothing need write for half a minute. Touching a file puts
    /// it behind that in the log, and fsync of it writes the log up to there.
    pub(crate) fn make_durable(&self) -> Result<()> {
        let file = open_file(&self.private, "lock", OFlag::O_RDWR)?;
        futimens(&file, &TimeSpec::UTIME_NOW, &TimeSpec::UTIME_NOW).context("touch", ".loopfs/lock")?;
        fsync(&file).context("fsync", ".loopfs/lock")
    }

    /// The directory that an entry is in, or shall be.
    pub(crate) fn parent(&self, entry: ContentSource<'_>) -> Result<&OwnedFd> {
        let absent = || {
            let detail =
                "the store has no directory of snapshots; opened for use, by a driver, it is given one";
            Error::new(ErrorKind::NotFound, "open", entry, detail)
        };
        match entry {
            ContentSource::Volume(_) => Ok(&self.volumes),
            ContentSource::Snapshot(_) => self.snapshots.as_ref().ok_or_else(absent),
        }
    }

    /// What an entry is; None where there is nothing.
    pub(crate) fn stat(&self, entry: ContentSource<'_>) -> Result<Option<FileStat>> {
        match fstatat(self.parent(entry)?, entry.id(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::sys("stat", entry, errno)),
        }
    }

    pub(crate) fn open_entry(&self, entry: ContentSource<'_>, flags: OFlag) -> Result<OwnedFd> {
        open_beneath(self.parent(entry)?.as_fd(), entry.id(), flags).context("open", entry)
    }

    /// Everything that is promised space is in one of these.
    pub(crate) fn entry_directories(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.volumes, &self.trash].into_iter().chain(&self.snapshots)
    }

    /// Moves an entry between directories of the store, never onto another one, durably.
    pub(crate) fn rename(
        &self,
        from: &OwnedFd,
        name: &str,
        to: &OwnedFd,
        new_name: &str,
    ) -> std::result::Result<(), Errno> {
        self.rename_held(from, name, to, new_name, ())
    }

    /// The same, holding what has to be held for the move and not until that is durable.
    pub(crate) fn rename_held(
        &self,
        from: &OwnedFd,
        name: &str,
        to: &OwnedFd,
        new_name: &str,
        held: impl Sized,
    ) -> std::result::Result<(), Errno> {
        renameat2(from, name, to, new_name, RenameFlags::RENAME_NOREPLACE)?;
        drop(held);
        fsync(to)?;
        fsync(from)
    }
}

/// Nobody but root passes here, whatever the modes of what is inside.
fn make_directory(root: BorrowedFd<'_>, name: &str) -> Result<()> {
    match mkdirat(root, name, Mode::S_IRWXU) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(Error::sys("make the directory", name, errno)),
    }
}

/// A name for staging or trash that no earlier or concurrent use has.
pub(crate) fn unique(id: &str) -> Result<String> {
    let suffix = random::number().context("make", "a unique name")?;
    Ok(format!("{id}.{suffix:016x}"))
}

/// Opens below a directory of the store and nowhere else: no `..`, no symbolic link, no mount.
pub(crate) fn open_beneath(
    directory: BorrowedFd<'_>,
    path: &str,
    flags: OFlag,
) -> std::result::Result<OwnedFd, Errno> {
    let resolve =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let mode = if flags.contains(OFlag::O_CREAT) { Mode::S_IRUSR | Mode::S_IWUSR } else { Mode::empty() };
    openat2(
        directory,
        path,
        OpenHow::new().flags(flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW).mode(mode).resolve(resolve),
    )
}

pub(crate) fn open_directory(parent: impl AsFd, name: &str) -> Result<OwnedFd> {
    open_beneath(parent.as_fd(), name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
        .context("open the directory", name)
}

pub(crate) fn open_file(parent: impl AsFd, name: &str, flags: OFlag) -> Result<OwnedFd> {
    open_beneath(parent.as_fd(), name, flags).context("open", format!(".loopfs/{name}"))
}

/// Names in a directory, `.` and `..` left out.
pub(crate) fn names(directory: &OwnedFd, what: &str) -> Result<Vec<String>> {
    // A duplicate would share the position of the descriptor it was made from.
    let own =
        open_beneath(directory.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY).context("open", what)?;
    let mut entries = nix::dir::Dir::from_fd(own).context("list", what)?;
    let mut names = Vec::new();
    for entry in entries.iter() {
        let entry = entry.context("list", what)?;
        // Entries that are not UTF-8 were not made by this code and are left alone.
        if let Ok(name) = entry.file_name().to_str()
            && !matches!(name, "." | "..")
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// What the entries of a directory are, as its listing has it (XFS made since 2013, or with `-n ftype=1`)
pub(crate) fn kinds(directory: &OwnedFd, what: &str) -> Result<Vec<nix::dir::Type>> {
    let own =
        open_beneath(directory.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY).context("open", what)?;
    let mut entries = nix::dir::Dir::from_fd(own).context("list", what)?;
    let mut kinds = Vec::new();
    for entry in entries.iter() {
        let entry = entry.context("list", what)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            kinds.extend(entry.file_type());
        }
    }
    Ok(kinds)
}
