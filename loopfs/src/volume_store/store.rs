//! The store: opening, checking and listing it.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

use nix::dir::Entry;
use nix::fcntl::OFlag;

use super::id::VolumeId;
use super::on_disk::{DataFilesystem, Layout, classify_missing, explain_failure, layout};
use super::pending::PendingVolumes;
use super::source::ContentSource;
use super::space::{Space, SpaceBook};
use super::spec::{StoreCounts, StoreOptions, VolumeKind};
use super::volume::{Volume, VolumeStats};
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::filesystem_uuid::FilesystemUuid;
use crate::flock;
use crate::loop_device::{Access, BackingFile};
use crate::mount::MountCache;
use crate::project_quota::ProjectIds;
use crate::units::DeviceNumber;

/// A store of volumes on one XFS file system, which is mounted with project quotas.
///
/// The store leaves other directories of the file system alone, and project ids outside its range.
#[derive(Debug)]
pub struct VolumeStore {
    pub(super) filesystem: DataFilesystem,
    pub(super) layout: Layout,
    pub(super) options: StoreOptions,
    pub(super) ids: ProjectIds,
    /// All mounts, for deletions.
    pub(super) mounts: Mutex<MountCache>,
    pub(super) pending: PendingVolumes,
}

/// Opens the file system that is mounted at `data_dir`, unless another one is recorded beside it. Changes nothing.
fn recorded_filesystem(data_dir: &Path) -> Result<DataFilesystem> {
    let filesystem = DataFilesystem::open(data_dir).map_err(|error| classify_missing(error, data_dir))?;
    filesystem.require_record()?;
    Ok(filesystem)
}

impl VolumeStore {
    /// Opens the store on the file system mounted at `data_dir`, and creates it at first use.
    ///
    /// At first use the call records the UUID of the file system beside the mount point, in `NAME.filesystem-uuid`. From then
    /// on it accepts no other file system there.
    ///
    /// # Errors
    /// [`ErrorKind::NotMounted`]: no file system is mounted there. [`ErrorKind::NeverMounted`]: the same, and no store was ever
    /// initialised there. [`ErrorKind::NotEnforced`]: the file system is mounted without project quotas.
    /// [`ErrorKind::WrongFilesystem`]: it is not XFS, the mount is not the root of a file system, it is another file
    /// system than at first use, or its limits cannot hold: it has a realtime section, default limits of projects, or project
    /// ids of 16 bits. [`ErrorKind::PermissionDenied`]: the process has no `CAP_SYS_ADMIN`. Each error says what
    /// to do. [`ErrorKind::InvalidInput`]: the store has entries, and [`StoreOptions::project_ids`] is another range than for these.
    pub fn open(data_dir: &Path, options: StoreOptions) -> Result<Self> {
        let filesystem = recorded_filesystem(data_dir)?;
        let root = filesystem.root.as_fd();
        // Read first, because another process may write it after it has initialised the store.
        let is_recorded = filesystem.recorded_uuid()?.is_some();
        if !Layout::is_initialised(root)? {
            if is_recorded {
                return Err(lost_store(data_dir));
            }
            layout::make_directory(root, layout::STAGING)?;
        }
        // Two processes may initialise the store concurrently. Any user can lock the root of the file system, and only root this directory.
        let staging = layout::open_directory(root, layout::STAGING)?;
        let _opening =
            flock::exclusive(staging, options.lock_timeout, "open the store, which takes the lock")?;
        filesystem.require_record()?;
        if !Layout::is_initialised(root)? {
            Layout::initialise(root)?;
        }
        if filesystem.recorded_uuid()?.is_none() {
            filesystem.write_record()?;
        }
        let store = Self::over(filesystem, options, Access::ReadWrite)?;
        store.space_book().record_overhead()?;
        Ok(store)
    }

    /// Opens the existing store on the file system mounted at `data_dir` without changing anything: the call creates no store
    /// and records no UUID. For programs that only read.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the file system contains no store. Otherwise as [`open`](Self::open).
    pub fn open_existing(data_dir: &Path, options: StoreOptions) -> Result<Self> {
        let filesystem = recorded_filesystem(data_dir)?;
        // Read first, as above.
        let recorded = filesystem.recorded_uuid()?;
        if !Layout::is_initialised(filesystem.root.as_fd())? {
            return Err(match recorded {
                Some(_) => lost_store(data_dir),
                None => {
                    let detail = "there is no store on the file system that is mounted there";
                    Error::new(ErrorKind::NotFound, "open the store", data_dir.display(), detail)
                }
            });
        }
        Self::over(filesystem, options, Access::ReadOnly)
    }

    /// Checks that a store can be opened or created on the file system that is mounted at `data_dir`. Changes nothing.
    ///
    /// # Errors
    /// Those of [`open`](Self::open) that concern the file system.
    pub fn check_data_directory(data_dir: &Path) -> Result<()> {
        recorded_filesystem(data_dir).map(drop)
    }

    fn over(filesystem: DataFilesystem, options: StoreOptions, access: Access) -> Result<Self> {
        let layout = Layout::open(filesystem.root.as_fd(), options.lock_timeout)?;
        layout.use_project_ids(&options.project_ids, access)?;
        let (root, range) = (filesystem.root.as_fd(), options.project_ids.clone());
        let ids = ProjectIds::new(root, layout.project_ids()?.as_fd(), range)?
            .with_lock_timeout(options.lock_timeout);
        let mounts = Mutex::new(MountCache::below("/".into()));
        Ok(Self { filesystem, layout, options, ids, mounts, pending: PendingVolumes::default() })
    }

    /// Checks that the store is unchanged since it was opened: the same mount of the same file system, writable, with enforced
    /// quotas.
    ///
    /// # Errors
    /// As [`open`](Self::open), [`ErrorKind::ReadOnly`], and [`ErrorKind::ShutDown`]. [`ErrorKind::NotMounted`] also if the
    /// file system was mounted there again in the meantime: open the store again.
    pub fn verify(&self) -> Result<()> {
        self.filesystem.require_mounted()?;
        self.filesystem.require_running()?;
        let status = nix::sys::statvfs::fstatvfs(&self.filesystem.root)
            .context("statfs", self.filesystem.path.display())?;
        if status.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY) {
            let (shown, cause) = (self.filesystem.path.display(), "it is mounted read-only");
            return Err(Error::new(ErrorKind::ReadOnly, "use the data directory", shown, cause)
                .with_remedy("look for an I/O error in the kernel log, and remount"));
        }
        Ok(())
    }

    /// Proves that the store can make changes durable: writes a change of a few bytes and waits until it is on disk. It needs no
    /// space, so a full file system passes. It blocks for as long as the disk does not respond.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`], [`ErrorKind::ReadOnly`], and those of fsync(2).
    pub fn prove_writable(&self) -> Result<()> {
        self.layout.make_durable().map_err(|error| explain_failure(error, &self.filesystem.path))
    }

    /// Returns `true` if a file is on the file system of this store.
    #[must_use]
    pub fn holds(&self, file: &BackingFile) -> bool {
        self.device().is_ok_and(|device| device == file.device)
    }

    /// Returns the device number of the store's file system, as files and mount tables show it.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn device(&self) -> Result<DeviceNumber> {
        BackingFile::of(&self.filesystem.root).map(|root| root.device)
    }

    /// Returns `true` if the store has a directory of this name at the root of the file system.
    #[cfg(feature = "publish")]
    pub(crate) fn owns_name(&self, name: &str) -> bool {
        layout::OWN.contains(&name)
    }

    /// Returns the UUID of the file system of this store.
    #[must_use]
    pub fn filesystem_uuid(&self) -> FilesystemUuid {
        self.filesystem.uuid
    }

    /// Opens a volume.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn volume(&self, id: &VolumeId) -> Result<Volume> {
        let (kind, entry) = self.open_entry(ContentSource::Volume(id))?;
        Volume::new(id.clone(), kind, entry)
    }

    pub(super) fn open_entry(&self, entry: ContentSource<'_>) -> Result<(VolumeKind, OwnedFd)> {
        let absent = || Error::new(ErrorKind::NotFound, "open", entry, "there is none of that id");
        // Repeated while other processes replace the entry by one of the other kind.
        loop {
            let status = self.layout.stat(entry)?.ok_or_else(absent)?;
            let (kind, flags) = match status.st_mode & libc::S_IFMT {
                libc::S_IFDIR => (VolumeKind::Filesystem, OFlag::O_RDONLY | OFlag::O_DIRECTORY),
                libc::S_IFREG => (VolumeKind::Block, OFlag::O_RDONLY),
                _ => {
                    let detail = "neither a directory nor a file";
                    return Err(Error::new(ErrorKind::InvalidInput, "open", entry, detail));
                }
            };
            let opened = match self.layout.open_entry(entry, flags) {
                Err(error) if error.errno() == Some(libc::ENOTDIR) => continue,
                opened => opened?,
            };
            let opened_as = nix::sys::stat::fstat(&opened).context("fstat", entry)?;
            if opened_as.st_mode & libc::S_IFMT == status.st_mode & libc::S_IFMT {
                return Ok((kind, opened));
            }
        }
    }

    /// Fails if `held` is no longer the entry of that id. No other file can have its inode number while it is held open.
    pub(super) fn require_undeleted(
        &self,
        held: &OwnedFd,
        entry: ContentSource<'_>,
        operation: &'static str,
    ) -> Result<()> {
        let status = nix::sys::stat::fstat(held).context("fstat", entry)?;
        match self.layout.stat(entry)? {
            Some(found) if found.st_ino == status.st_ino => Ok(()),
            _ => {
                let detail = "it was deleted in the meantime";
                Err(Error::new(ErrorKind::NotFound, operation, entry, detail))
            }
        }
    }

    /// Returns the ids of all volumes, in no particular order.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn list(&self) -> Result<Vec<VolumeId>> {
        let names = layout::names(&self.layout.volumes, "volumes")?;
        Ok(names.iter().filter_map(|name| VolumeId::parse(name).ok()).collect())
    }

    /// Returns the images of all Block volumes, each with its volume: a loop device has the image as its
    /// [`backing`](crate::loop_device::Binding::backing). Takes one directory listing, and opens no volume.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn images(&self) -> Result<HashMap<BackingFile, VolumeId>> {
        let device = self.device()?;
        let image = |entry: &Entry| {
            let id = entry.file_name().to_str().ok().and_then(|name| VolumeId::parse(name).ok())?;
            // A listing without types has directories too, to which no device is bound.
            let is_directory = entry.file_type() == Some(nix::dir::Type::Directory);
            (!is_directory).then(|| (BackingFile { device, inode: entry.ino() }, id))
        };
        Ok(layout::list(&self.layout.volumes, "volumes", image)?.into_iter().collect())
    }

    /// Returns the counts of volumes and of entries in the trash. Takes two directory listings, and opens no volume.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn counts(&self) -> Result<StoreCounts> {
        let (mut directories, mut images) = (0, 0);
        for kind in layout::list(&self.layout.volumes, "volumes", Entry::file_type)? {
            match kind {
                nix::dir::Type::Directory => directories += 1,
                nix::dir::Type::File => images += 1,
                _ => {}
            }
        }
        Ok(StoreCounts { directories, images, trash: self.count_trash()? })
    }

    /// Returns the number of deleted entries. Records of ids, which are links, are none.
    fn count_trash(&self) -> Result<usize> {
        let kinds = layout::list(&self.layout.trash, "trash", Entry::file_type)?;
        Ok(kinds.into_iter().filter(|kind| *kind != nix::dir::Type::Symlink).count())
    }

    /// Adds to an error for lack of space that deleted entries still hold some.
    pub(super) fn mention_trash<T>(&self, result: Result<T>) -> Result<T> {
        let trash = |error: &Error| match error.kind() {
            ErrorKind::NoSpace => self.count_trash().unwrap_or_default(),
            _ => 0,
        };
        result.map_err(|error| match trash(&error) {
            0 => error,
            entries => {
                let cause = format!("deleted volumes still hold space, with entries in the trash: {entries}");
                let remedy = "empty the trash, and end the programs that have them open";
                error.add(&Explanation::from(cause).with_remedy(remedy))
            }
        })
    }

    /// Returns the view of the store that its reservations are changed through.
    pub(super) fn space_book(&self) -> SpaceBook<'_> {
        SpaceBook {
            layout: &self.layout,
            filesystem: &self.filesystem,
            ids: &self.ids,
            range: &self.options.project_ids,
        }
    }

    /// Returns the space of the file system: its size, the reserved bytes and the available bytes. While images are being
    /// created or expanded, `available` may be too small by their sizes. Afterwards it is exact again, except for the space
    /// that the file system itself has allocated since the last count.
    ///
    /// If the total has to be counted, the call takes time proportional to the number of volumes, and waits for the blocks that
    /// the file system frees in the background.
    ///
    /// # Errors
    /// Those of statfs(2) and quotactl_fd(2).
    pub fn space(&self) -> Result<Space> {
        self.space_book().space()
    }

    /// Returns the usage and capacity of a volume, in constant time.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn stats(&self, id: &VolumeId) -> Result<VolumeStats> {
        self.volume(id)?.stats()
    }
}

/// Returns the error for a file system whose store was initialised, but whose directories are missing.
fn lost_store(data_dir: &Path) -> Error {
    let cause = "the store that was initialised on this file system no longer exists";
    Error::new(ErrorKind::NotFound, "open the store", data_dir.display(), cause).with_remedy(
        "restore it, or, to initialise a new one, remove the record of its UUID beside the mount point",
    )
}

pub(super) fn if_found<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}
