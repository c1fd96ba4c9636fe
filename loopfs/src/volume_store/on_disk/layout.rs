//! The on-disk layout, and the only code that names entries of it.
//!
//! ```text
//! .loopfs/format         "loopfs store 1"; created last at initialisation
//! .loopfs/lock           flock: shared by changes, exclusive for recovery
//! .loopfs/promised       flock: the reservation record
//! .loopfs/project-ids    the range of project ids; flock: one allocation at a time
//! .loopfs/users/ID       a link, the publication record of directory ID: the boot and the path; flock of users: changes
//! volumes/ID             a directory (Filesystem) or a regular file (Block)
//! snapshots/ID           likewise, and never written to
//! staging/ID.SUFFIX      a directory in creation, not yet a volume or snapshot
//! trash/ID.SUFFIX        a deleted volume or snapshot, until its space and project id are free
//! trash/draining:NUMBER  a link: a deleted directory is open, and the project id is free after its last close
//! ```
//!
//! A volume is its entry in `volumes`, which a single rename or link makes appear complete; so is a snapshot.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, OFlag, OpenHow, RenameFlags, ResolveFlag, openat2, renameat2};
use nix::sys::stat::{FileStat, Mode, fstatat, futimens, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::fsync;

use crate::boot::Boot;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock::{self, Queue};
use crate::loop_device::Access;
use crate::project_quota::ProjectId;
use crate::sys::random;
use crate::volume_store::source::ContentSource;

const FORMAT: &str = "loopfs store 1\n";
const PUBLICATIONS: &str = ".loopfs/users";
/// The directory of the files of the store.
pub(crate) const PRIVATE: &str = ".loopfs";
/// The directory of the copies in progress.
pub(crate) const STAGING: &str = "staging";
/// The directories of a store at the root of its file system.
pub(crate) const OWN: [&str; 5] = [PRIVATE, "volumes", "snapshots", STAGING, "trash"];

/// The directories of the store, held open. Everything else is opened beneath them.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) private: OwnedFd,
    pub(crate) volumes: OwnedFd,
    pub(crate) snapshots: OwnedFd,
    pub(crate) publications: OwnedFd,
    pub(crate) staging: OwnedFd,
    pub(crate) trash: OwnedFd,
    pub(crate) boot: Boot,
    /// The threads that change reservations.
    pub(crate) record_queue: Queue,
    /// How long to wait for each lock of the store.
    pub(crate) lock_timeout: Duration,
}

impl Layout {
    /// Returns `true` if the file system contains a store. An unknown format is an error.
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
                let cause =
                    format!("{:?} is not a format this version knows", String::from_utf8_lossy(found));
                let error = Error::new(ErrorKind::Unsupported, "open the store", ".loopfs/format", cause);
                Err(error.with_remedy(
                    "nothing was changed, so install the version of loopfs that used this store last, or a later one",
                ))
            }
        }
    }

    /// Creates the missing entries. The format file comes last, so the next call completes an incomplete store.
    pub(crate) fn initialise(root: BorrowedFd<'_>) -> Result<()> {
        for name in OWN {
            make_directory(root, name)?;
        }
        make_directory(root, PUBLICATIONS)?;
        let private = open_directory(root, PRIVATE)?;
        for name in ["lock", "project-ids", "promised"] {
            open_file(&private, name, OFlag::O_RDWR | OFlag::O_CREAT)?;
        }
        let temporary = open_file(&private, "format.new", OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC)?;
        nix::unistd::write(&temporary, FORMAT.as_bytes()).context("write", ".loopfs/format.new")?;
        fsync(&temporary).context("fsync", ".loopfs/format.new")?;
        renameat2(&private, "format.new", &private, "format", RenameFlags::empty())
            .context("make", ".loopfs/format")?;
        fsync(&private).context("fsync", PRIVATE)?;
        fsync(root).context("fsync", "the root of the store")
    }

    pub(crate) fn open(root: BorrowedFd<'_>, lock_timeout: Duration) -> Result<Self> {
        Ok(Self {
            private: open_directory(root, PRIVATE)?,
            volumes: open_directory(root, "volumes")?,
            snapshots: open_directory(root, "snapshots")?,
            publications: open_directory(root, PUBLICATIONS)?,
            staging: open_directory(root, STAGING)?,
            trash: open_directory(root, "trash")?,
            boot: Boot::current()?,
            record_queue: Queue::default(),
            lock_timeout,
        })
    }

    /// Takes the lock that is held while a volume is created, expanded or deleted.
    pub(crate) fn lock_shared(&self) -> Result<Flock<OwnedFd>> {
        const OPERATION: &str = "change an entry of the store, which takes the lock";
        let _turn = flock::shared(self.turn()?, self.lock_timeout, OPERATION)?;
        flock::shared(self.lock_file()?, self.lock_timeout, OPERATION)
    }

    /// Takes the lock that excludes all operations in progress. All changes of the store wait behind this call.
    pub(crate) fn lock_exclusive(&self, timeout: Duration) -> Result<Flock<OwnedFd>> {
        const OPERATION: &str = "recover the store, which takes the lock";
        // The kernel grants a shared lock while another one is held, so callers that overlap could keep this one out for good.
        // While it has the turn, they wait behind it.
        let _turn = flock::exclusive(self.turn()?, timeout, OPERATION)?;
        flock::exclusive(self.lock_file()?, timeout, OPERATION)
    }

    /// The file whose lock a caller holds while it waits for the lock of the store.
    fn turn(&self) -> Result<OwnedFd> {
        open_directory(&self.private, ".")
    }

    /// The lock file of [`ProjectIds`](crate::project_quota::ProjectIds).
    pub(crate) fn project_ids(&self) -> Result<OwnedFd> {
        open_file(&self.private, "project-ids", OFlag::O_RDONLY)
    }

    /// Records the range of project ids, or compares it with the recorded one. Limits of volumes with other ids would never be
    /// removed, so only a store without entries takes another range. With
    /// [`Access::ReadOnly`] it writes nothing.
    pub(crate) fn use_project_ids(&self, range: &RangeInclusive<ProjectId>, access: Access) -> Result<()> {
        const OBJECT: &str = ".loopfs/project-ids";
        let text = format!("{} {}\n", range.start(), range.end());
        let mut recorded = [0; 64];
        let length = nix::unistd::read(self.project_ids()?, &mut recorded).context("read", OBJECT)?;
        let recorded = String::from_utf8_lossy(&recorded[..length]);
        if recorded == text {
            return Ok(());
        }
        if !recorded.is_empty() && self.has_entries()? {
            let cause = format!(
                "the volumes of the store use the ids {}, and {} were requested",
                recorded.trim_end().replacen(' ', " to ", 1),
                text.trim_end().replacen(' ', " to ", 1)
            );
            let operation = "open the store with other project ids";
            return Err(Error::new(ErrorKind::InvalidInput, operation, OBJECT, cause).with_remedy(
                "request the former (StoreOptions::project_ids), or delete the volumes and snapshots and empty the trash first",
            ));
        }
        if access == Access::ReadOnly {
            return Ok(());
        }
        // In place, because waiting processes lock this file. The text is shorter than a sector, so no crash splits it.
        let written = open_file(&self.private, "project-ids", OFlag::O_RDWR).and_then(|file| {
            nix::sys::uio::pwrite(&file, text.as_bytes(), 0).context("write", OBJECT)?;
            nix::unistd::ftruncate(&file, text.len() as i64).context("write", OBJECT)?;
            fsync(&file).context("fsync", OBJECT)
        });
        match written {
            Err(error) if error.kind() == ErrorKind::ReadOnly => Ok(()),
            written => written,
        }
    }

    /// Returns `true` if the store has volumes, snapshots, or entries in staging or the trash.
    pub(crate) fn has_entries(&self) -> Result<bool> {
        for directory in self.entry_directories().chain([&self.staging]) {
            if has_entries(directory, "volumes, snapshots and trash")? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens the lock file. It is never renamed or replaced: otherwise a waiting process could get a lock on a file without a name.
    fn lock_file(&self) -> Result<OwnedFd> {
        open_file(&self.private, "lock", OFlag::O_RDWR)
    }

    /// Makes earlier changes durable, including those without a file to fsync: a limit is only in the log of the file system, which
    /// may stay in memory for half a minute. Touching a file appends to that log, and fsync of the file writes the log up to that
    /// point.
    pub(crate) fn make_durable(&self) -> Result<()> {
        let file = self.lock_file()?;
        futimens(&file, &TimeSpec::UTIME_NOW, &TimeSpec::UTIME_NOW).context("touch", ".loopfs/lock")?;
        fsync(&file).context("fsync", ".loopfs/lock")
    }

    /// Returns the directory that contains an entry, or will contain it.
    pub(crate) fn parent(&self, entry: ContentSource<'_>) -> &OwnedFd {
        match entry {
            ContentSource::Volume(_) => &self.volumes,
            ContentSource::Snapshot(_) => &self.snapshots,
        }
    }

    /// Returns the status of an entry, or `None` if it does not exist.
    pub(crate) fn stat(&self, entry: ContentSource<'_>) -> Result<Option<FileStat>> {
        match fstatat(self.parent(entry), entry.id(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::sys("stat", entry, errno)),
        }
    }

    pub(crate) fn open_entry(&self, entry: ContentSource<'_>, flags: OFlag) -> Result<OwnedFd> {
        open_beneath(self.parent(entry).as_fd(), entry.id(), flags).context("open", entry)
    }

    /// Returns the directories whose entries have reservations.
    pub(crate) fn entry_directories(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.volumes, &self.trash, &self.snapshots].into_iter()
    }
}

/// Moves an entry between directories of the store, never onto another one, durably. Drops `held` after the rename and before it is durable.
pub(crate) fn rename(
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

/// Creates a directory that only root can pass, whatever the modes of its entries.
pub(crate) fn make_directory(root: BorrowedFd<'_>, name: &str) -> Result<()> {
    match mkdirat(root, name, Mode::S_IRWXU) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(Error::sys("make the directory", name, errno)),
    }
}

/// Returns a unique name for an entry of staging or trash.
pub(crate) fn unique(id: &str) -> Result<String> {
    let suffix = random::number().context("make", "a unique name")?;
    Ok(format!("{id}.{suffix:016x}"))
}

/// Opens a path beneath a directory of the store: without `..`, symbolic links and mounts.
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

/// Returns the names in a directory, without `.` and `..`.
pub(crate) fn names(directory: &OwnedFd, what: &str) -> Result<Vec<String>> {
    // Entries that are not UTF-8 were not created by this code and are ignored.
    list(directory, what, |entry| entry.file_name().to_str().ok().map(str::to_owned))
}

/// Opens the directories in a directory, each when it is reached. Leaves out those that were removed since they were listed.
pub(crate) fn directories(
    parent: &OwnedFd,
    what: &str,
) -> Result<impl Iterator<Item = Result<(String, OwnedFd)>>> {
    Ok(names(parent, what)?.into_iter().filter_map(move |name| {
        match open_beneath(parent.as_fd(), &name, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
            Ok(directory) => Some(Ok((name, directory))),
            Err(Errno::ENOTDIR | Errno::ENOENT) => None,
            Err(errno) => Some(Err(Error::sys("open", name, errno))),
        }
    }))
}

/// Returns `true` if a directory has an entry besides `.` and `..`. Stops at the first one.
pub(crate) fn has_entries(directory: &OwnedFd, what: &str) -> Result<bool> {
    for entry in reopen_to_list(directory, what)?.iter() {
        if !is_dot(&entry.context("list", what)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Lists a directory without `.` and `..`, and returns what `pick` returns for the entries. They have a type if XFS was formatted since
/// 2013, or with `-n ftype=1`.
pub(crate) fn list<T>(
    directory: &OwnedFd,
    what: &str,
    pick: impl Fn(&nix::dir::Entry) -> Option<T>,
) -> Result<Vec<T>> {
    let mut picked = Vec::new();
    for entry in reopen_to_list(directory, what)?.iter() {
        let entry = entry.context("list", what)?;
        if !is_dot(&entry) {
            picked.extend(pick(&entry));
        }
    }
    Ok(picked)
}

/// Opens a directory again, because a duplicate would share the position of the original descriptor.
fn reopen_to_list(directory: &OwnedFd, what: &str) -> Result<nix::dir::Dir> {
    let own =
        open_beneath(directory.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY).context("open", what)?;
    nix::dir::Dir::from_fd(own).context("list", what)
}

fn is_dot(entry: &nix::dir::Entry) -> bool {
    matches!(entry.file_name().to_bytes(), b"." | b"..")
}
