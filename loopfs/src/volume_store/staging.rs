//! Staging: a directory that is being created, until it gets its name.
//!
//! Filling it with a copy may take long, and neither recovery nor other volumes must wait for that. The creating process
//! therefore holds a lock on the staged directory itself, which the kernel drops when the process dies. Recovery removes
//! directories that are not locked, because they are incomplete, and leaves locked ones alone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::on_disk::{DirectoryAttributes, DirectorySpec, layout};
use super::source::ContentSource;
use super::space::Reservation;
use super::store::VolumeStore;
use crate::error::{Context, Error, Result};
use crate::project_quota::{Limits, ProjectId, ProjectQuota, Usage};

/// A staged directory in a project of its own. If it is dropped without being published or discarded, recovery removes it.
#[must_use]
pub(super) struct Staged<'a> {
    store: &'a VolumeStore,
    entry: ContentSource<'a>,
    name: String,
    directory: Flock<OwnedFd>,
    project: ProjectId,
    /// Its current limits, which are reserved.
    limits: Reservation,
}

impl VolumeStore {
    /// Creates a staged directory: reserves the limits first and then assigns the directory to the project, so it is never without a
    /// limit. The caller holds the shared lock.
    pub(super) fn stage<'a>(
        &'a self,
        entry: ContentSource<'a>,
        operation: &'static str,
        reservation: Reservation,
        spec: DirectorySpec,
    ) -> Result<Staged<'a>> {
        let staged = self.space_book().reserve_limit(
            entry,
            operation,
            || Ok(reservation),
            || self.stage_empty(entry, reservation.limits()),
        );
        let (name, directory, project) = self.mention_trash(staged)?;
        let staged = Staged { store: self, entry, name, directory, project, limits: reservation };
        // The attributes must exist before the directory has content, because recovery reads from them to which project the
        // content is charged.
        match (DirectoryAttributes { project, spec }).write(&staged) {
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

    /// Removes a staged directory that no live process is creating. Returns `false` if a live process is. The caller holds the
    /// exclusive lock, so no directory is between its creation and its lock.
    pub(super) fn remove_abandoned(&self, name: &str) -> Result<bool> {
        let directory = layout::open_directory(&self.layout.staging, name)?;
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(_directory) => self.unstage(name).map(|_| true),
            Err((_, Errno::EWOULDBLOCK)) => Ok(false),
            Err((_, errno)) => Err(Error::sys("lock in staging", name, errno)),
        }
    }

    /// Removes a staged directory and returns `true`. If it is not empty, moves it to the trash and returns `false`.
    fn unstage(&self, name: &str) -> Result<bool> {
        let staging = &self.layout.staging;
        match unlinkat(staging, name, UnlinkatFlags::RemoveDir) {
            Ok(()) => Ok(true),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                let moved = layout::rename(staging, name, &self.layout.trash, name, ());
                moved.context("move to the trash", name).map(|()| false)
            }
            Err(errno) => Err(Error::sys("remove from staging", name, errno)),
        }
    }
}

impl Staged<'_> {
    /// Returns the usage that is charged to the directory.
    pub(super) fn usage(&self) -> Result<Option<Usage>> {
        self.quota().usage(self.project)
    }

    /// Sets the final limits, and releases the reservation beyond them.
    pub(super) fn set_final_limits(&mut self, limits: Reservation) -> Result<()> {
        let set = || self.quota().set_limits(self.project, limits.limits()).map(drop);
        self.store.space_book().lower_limit(self.limits.saturating_sub(limits), set)?;
        self.limits = limits;
        Ok(())
    }

    /// Gives the directory its name, durably. The caller holds the shared lock.
    ///
    /// Earlier changes of the directory need no fsync of their own: XFS writes its log in order, and the name is the last
    /// change.
    pub(super) fn publish(self) -> Result<()> {
        let Self { store, entry, ref name, .. } = self;
        let (from, to) = (&store.layout.staging, store.layout.parent(entry));
        let published = layout::rename(from, name, to, entry.id(), ()).context("create", entry);
        published.map_err(|error| self.discard(error))
    }

    /// Removes the directory after `error`, and returns that error. The caller holds the shared lock. If the removal fails, recovery
    /// removes the directory later.
    pub(super) fn discard(self, error: Error) -> Error {
        let Self { store, name, directory, project, .. } = self;
        // By its staging name, which no other directory has.
        if store.unstage(&name).is_ok_and(|removed| removed) {
            // An open directory is still charged to its project.
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
