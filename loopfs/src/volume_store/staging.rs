//! A directory being made, until it has its name.
//!
//! It may take long to fill one with a copy, and neither recovery nor other volumes shall wait for that. So the maker
//! holds a lock on the staged directory itself, which the kernel drops when the maker dies: what nobody holds is
//! half made, and what somebody holds is left alone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::on_disk::{Attributes, layout};
use super::source::ContentSource;
use super::store::VolumeStore;
use crate::error::{Context, Error, Result};
use crate::project_quota::{Limits, ProjectId, ProjectQuota, Usage};
use crate::units::{Bytes, Inodes};

/// In staging, in a project of its own, and nobody else's. One that is dropped is for recovery to remove.
#[must_use]
pub(super) struct Staged<'a> {
    store: &'a VolumeStore,
    entry: ContentSource<'a>,
    name: String,
    directory: Flock<OwnedFd>,
    project: ProjectId,
    /// Its limit, which is reserved for it.
    limit: Bytes,
}

impl VolumeStore {
    /// Limits are reserved, then the directory is tagged: at no moment is there one without a limit. The shared lock
    /// must be held.
    pub(super) fn stage<'a>(
        &'a self,
        entry: ContentSource<'a>,
        operation: &'static str,
        (bytes, inodes): (Bytes, Inodes),
        attributes: impl FnOnce(ProjectId) -> Attributes,
    ) -> Result<Staged<'a>> {
        let limits = Limits::hard(bytes, inodes);
        let (name, directory, project) = self.space_book().reserve_limit(
            entry,
            operation,
            || Ok(bytes),
            || self.stage_empty(entry, limits),
        )?;
        let staged = Staged { store: self, entry, name, directory, project, limit: bytes };
        // Before there is anything in it: whoever removes it learns from them which project that was charged to.
        match attributes(project).write(&staged) {
            Ok(()) => Ok(staged),
            Err(error) => Err(staged.discard(error)),
        }
    }

    fn stage_empty(
        &self,
        entry: ContentSource<'_>,
        limits: Limits,
    ) -> Result<(String, Flock<OwnedFd>, ProjectId)> {
        let staging = &self.layout.staging;
        let name = layout::unique(entry.id())?;
        mkdirat(staging, name.as_str(), Mode::S_IRWXU).context("make the directory of", entry)?;
        let tagged = layout::open_directory(staging, &name).and_then(|directory| {
            let directory = Flock::lock(directory, FlockArg::LockExclusiveNonblock)
                .map_err(|(_, errno)| Error::sys("lock", entry, errno))?;
            let project = self.ids.create(&*directory, limits)?;
            Ok((directory, project))
        });
        match tagged {
            Ok((directory, project)) => Ok((name, directory, project)),
            Err(error) => {
                unlinkat(staging, name.as_str(), UnlinkatFlags::RemoveDir).ok();
                Err(error)
            }
        }
    }

    /// Takes away a staged directory that nobody is making any more; false if somebody is. The exclusive lock must
    /// be held, so that none is between being made and being locked.
    pub(super) fn remove_abandoned(&self, name: &str) -> Result<bool> {
        let directory = layout::open_directory(&self.layout.staging, name)?;
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(_directory) => self.unstage(name).map(|_| true),
            Err((_, Errno::EWOULDBLOCK)) => Ok(false),
            Err((_, errno)) => Err(Error::sys("lock in staging", name, errno)),
        }
    }

    /// Removes a staged directory, or moves it to the trash where there is something in it.
    fn unstage(&self, name: &str) -> Result<Unstaged> {
        let staging = &self.layout.staging;
        match unlinkat(staging, name, UnlinkatFlags::RemoveDir) {
            Ok(()) => Ok(Unstaged::Removed),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                let moved = self.layout.rename(staging, name, &self.layout.trash, name);
                moved.context("move to the trash", name).map(|()| Unstaged::Trashed)
            }
            Err(errno) => Err(Error::sys("remove from staging", name, errno)),
        }
    }
}

enum Unstaged {
    Removed,
    Trashed,
}

impl Staged<'_> {
    /// What is charged to it.
    pub(super) fn usage(&self) -> Result<Option<Usage>> {
        self.quota().usage(self.project)
    }

    /// Changes its limits to what they shall be in the end, and takes back what was promised beyond that.
    pub(super) fn set_final_limits(&mut self, bytes: Bytes, inodes: Inodes) -> Result<()> {
        let surplus = self.limit.saturating_sub(bytes);
        let limits = Limits::hard(bytes, inodes);
        let set = || self.quota().set_limits(self.project, limits).map(drop);
        self.store.space_book().lower_limit(surplus, set)?;
        self.limit = bytes;
        Ok(())
    }

    /// Gives it its name, durably. The shared lock must be held.
    ///
    /// What was done to it before needs no fsync of its own: the log of XFS is written in order, and ends with the name.
    pub(super) fn publish(self) -> Result<()> {
        let Self { store, entry, ref name, .. } = self;
        let published = store.layout.parent(entry).and_then(|parent| {
            store.layout.rename(&store.layout.staging, name, parent, entry.id()).context("create", entry)
        });
        match published {
            Ok(()) => Ok(()),
            Err(error) => Err(self.discard(error)),
        }
    }

    /// Takes it away, after an error: that is answered, for it says more than another one would. The shared lock must be
    /// held. What cannot be undone now is undone by recovery.
    pub(super) fn discard(self, error: Error) -> Error {
        let Self { store, name, directory, project, .. } = self;
        // Under its name of before or none: another one must not be made of it now.
        if let Ok(Unstaged::Removed) = store.unstage(&name) {
            // An open directory is charged.
            drop(directory);
            store.space_book().release_project(project).ok();
        }
        error
    }

    fn quota(&self) -> ProjectQuota<'_> {
        ProjectQuota::of(self.directory.as_fd())
    }
}

impl AsFd for Staged<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}
