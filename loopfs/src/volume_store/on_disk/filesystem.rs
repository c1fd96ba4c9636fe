//! The file system of a store, and the check that it is still mounted.
//!
//! The data directory is a mount point. Beside it, on the file system that holds the mount point,
//! `NAME.filesystem-uuid` records which file system was mounted there when the store was initialised. The store therefore
//! distinguishes a missing mount and another disk from a new one, and never writes below a mount point without its mount.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::filesystem_uuid::FilesystemUuid;
use crate::mount::table as mountinfo;
use crate::project_quota::ProjectQuota;
use crate::sys::{statx, xfs};

/// The root of a mounted XFS with project quotas, held open.
#[derive(Debug)]
pub(crate) struct DataFilesystem {
    /// Absolute path of the mount point: the working directory may change later.
    pub(crate) path: PathBuf,
    /// The root directory.
    pub(crate) root: OwnedFd,
    pub(crate) uuid: FilesystemUuid,
}

const OPERATION: &str = "open the data directory";
const DIRECTORY: OFlag =
    OFlag::O_DIRECTORY.union(OFlag::O_RDONLY).union(OFlag::O_CLOEXEC).union(OFlag::O_NOFOLLOW);

impl DataFilesystem {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let path = &absolute(path)?;
        let shown = path.display();
        let root = open_root(path)?;
        let (device, kind, root_path) = mount_of(&root, path)?;
        if !statx::is_mount_root(&root).context("statx", &shown)? {
            let cause = format!(
                "nothing is mounted there: it is a plain directory of the {kind} file system on device {device}, \
                 which is left untouched"
            );
            return Err(Error::new(ErrorKind::NotMounted, OPERATION, shown, cause)
                .with_remedy("mount the data file system (XFS, option prjquota)"));
        }
        let unusable = |explanation| Error::new(ErrorKind::WrongFilesystem, OPERATION, &shown, explanation);
        let geometry = match (kind.as_str(), xfs::geometry(&root)) {
            ("xfs", Ok(geometry)) => geometry,
            ("xfs", Err(errno)) => return Err(Error::sys("read the XFS geometry of", shown, errno)),
            _ => {
                let cause = format!("the file system there is {kind}");
                return Err(
                    unusable(cause.into()).with_remedy("volumes need XFS mounted with option prjquota")
                );
            }
        };
        if root_path != Path::new("/") {
            let cause =
                format!("{} of its file system is mounted there and not the root", root_path.display());
            return Err(unusable(cause.into()).with_remedy("give volumes a file system of their own"));
        }
        if let Some(problem) = geometry_problem(&geometry) {
            return Err(unusable(problem));
        }
        let data = Self { path: path.to_owned(), root, uuid: FilesystemUuid(geometry.uuid) };
        data.require_enforcement()?;
        if data.quota().has_default_limits()? {
            let cause = "its project quotas have default limits, which every project without limits gets, so no project id would \
                         become free";
            return Err(unusable(cause.into()).with_remedy(format!(
                "remove them with `xfs_quota -x -c 'limit -p -d bsoft=0 bhard=0 isoft=0 ihard=0' {shown}`"
            )));
        }
        Ok(data)
    }

    pub(crate) fn quota(&self) -> ProjectQuota<'_> {
        ProjectQuota::of(self.root.as_fd())
    }

    /// Checks that limits are enforced: project quotas can be switched off while the file system is mounted.
    pub(crate) fn require_enforcement(&self) -> Result<()> {
        match self.quota().enforcement()?.problem() {
            None => Ok(()),
            Some((_, problem)) => {
                let shown = self.path.display();
                Err(Error::new(ErrorKind::NotEnforced, "use the data directory", shown, problem))
            }
        }
    }

    /// Checks that the file system is running: after an I/O error XFS shuts down, and every fstat(2) fails with EIO.
    pub(crate) fn require_running(&self) -> Result<()> {
        let status = nix::sys::stat::fstat(&self.root).context("fstat", self.path.display());
        status.map(drop).map_err(|error| explain_failure(error, &self.path))
    }

    /// Checks that the path still leads to the mount that is held open.
    pub(crate) fn require_mounted(&self) -> Result<()> {
        if self.is_same_mount(&open_root(&self.path)?)? {
            return self.require_enforcement();
        }
        let now = Self::open(&self.path)?;
        if now.uuid != self.uuid {
            return Err(foreign(&self.path, self.uuid, now.uuid));
        }
        // The descriptors lead to the earlier mount. If that was unmounted lazily, none of its directories can be
        // bind-mounted any more (EINVAL).
        let cause = "the file system was mounted again since the store was opened";
        Err(Error::new(ErrorKind::NotMounted, "use the data directory", self.path.display(), cause)
            .with_remedy("open the store again"))
    }

    /// Returns `true` if `root` is in the mount that was opened. That check is sufficient: the root of a mount never changes, and no
    /// other mount gets its id while the root is held open. Its cost does not grow with the number of mounts.
    fn is_same_mount(&self, root: &OwnedFd) -> Result<bool> {
        let id = |root| statx::mount_id(root).context("statx", self.path.display());
        let (opened, now) = (id(&self.root)?, id(root)?);
        Ok(opened.is_some() && opened == now)
    }

    /// Reads the UUID that is recorded beside the mount point, if there is one.
    pub(crate) fn recorded_uuid(&self) -> Result<Option<FilesystemUuid>> {
        let path = record_path(&self.path);
        match std::fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context("read", path.display()),
        }
    }

    pub(crate) fn write_record(&self) -> Result<()> {
        let path = record_path(&self.path);
        let temporary = path.with_extension("filesystem-uuid.new");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&temporary)?;
            writeln!(file, "{}", self.uuid)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)?;
            File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        write().context("record the file system in", path.display())
    }

    pub(crate) fn require_record(&self) -> Result<()> {
        match self.recorded_uuid()? {
            Some(recorded) if recorded != self.uuid => Err(foreign(&self.path, recorded, self.uuid)),
            _ => Ok(()),
        }
    }
}

/// Returns why a store cannot limit volumes on an XFS, and the remedy. Returns `None` if it can.
fn geometry_problem(geometry: &xfs::Geometry) -> Option<Explanation> {
    if geometry.rtblocks > 0 {
        return Some(Explanation::of(
            "the file system has a realtime section, whose blocks no limit of bytes counts",
            "use a disk formatted without one, by `loopfs data-dir format`",
        ));
    }
    if geometry.flags & xfs::PROJID32 == 0 {
        return Some(Explanation::of(
            "the file system stores project ids of 16 bits only",
            "use a disk formatted with them in 32 bits, by `loopfs data-dir format`",
        ));
    }
    None
}

/// Returns the path from the root directory on. It ends with the name of the mount point, beside which the record lies.
/// A symbolic link of that name is not followed.
fn absolute(path: &Path) -> Result<PathBuf> {
    let resolved = match path.file_name() {
        Some(_) => std::path::absolute(path),
        // Such as `.` or `data/..`: only the kernel knows the name.
        None => std::fs::canonicalize(path),
    };
    let resolved = resolved.context(OPERATION, path.display())?;
    if resolved.file_name().is_none() {
        let cause = "the root directory cannot be a data directory";
        return Err(Error::new(ErrorKind::InvalidInput, OPERATION, path.display(), cause)
            .with_remedy("mount the data file system below it"));
    }
    Ok(resolved)
}

fn open_root(path: &Path) -> Result<OwnedFd> {
    open(path, DIRECTORY, Mode::empty()).map_err(|errno| {
        let error = Error::sys(OPERATION, path.display(), errno);
        match error.kind() {
            ErrorKind::NotFound => error
                .with_kind(ErrorKind::NotMounted)
                .with_remedy("make it the mount point of an XFS file system"),
            _ => explain_failure(error, path),
        }
    })
}

/// Explains EIO.
pub(crate) fn explain_failure(error: Error, path: &Path) -> Error {
    if error.errno() != Some(libc::EIO) {
        return error;
    }
    let cause = "the disk does not take what is written, or the file system was shut down over that";
    error.with_kind(ErrorKind::ShutDown).explain(cause).with_remedy(format!(
        "look for I/O errors in the kernel log, repair the disk, unmount {} and mount it again (xfs_repair if that is refused)",
        path.display()
    ))
}

fn record_path(data_dir: &Path) -> PathBuf {
    let mut name = data_dir.file_name().unwrap_or_default().to_owned();
    name.push(".filesystem-uuid");
    data_dir.with_file_name(name)
}

/// Distinguishes a machine that never had a data file system from one whose data file system is missing: only the latter
/// has a record beside the mount point. If the record cannot be looked up, the file system counts as missing.
pub(crate) fn classify_missing(error: Error, path: &Path) -> Error {
    let never_recorded = || match std::fs::symlink_metadata(record_path(path)) {
        Ok(_) => false,
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if error.kind() == ErrorKind::NotMounted && never_recorded() {
        return error.with_kind(ErrorKind::NeverMounted);
    }
    error
}

fn foreign(path: &Path, expected: FilesystemUuid, found: FilesystemUuid) -> Error {
    let cause = format!("the store was initialised on file system {expected}, and {found} is mounted there");
    Error::new(ErrorKind::WrongFilesystem, OPERATION, path.display(), cause).with_remedy(format!(
        "mount the right one, or, to initialise a store on this one, remove {}",
        record_path(path).display()
    ))
}

/// Device number, type and root of the mount a directory was reached through.
fn mount_of(directory: &OwnedFd, path: &Path) -> Result<(String, String, PathBuf)> {
    let id = statx::mount_id(directory).context("statx", path.display())?;
    let mounts = mountinfo::read()?;
    let mount = mounts.iter().find(|mount| Some(mount.id) == id).ok_or_else(|| {
        Error::new(ErrorKind::Other, "find the mount of", path.display(), "it is not in /proc/self/mountinfo")
    })?;
    Ok((mount.device.to_string(), mount.fs_type.clone(), mount.root.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_store::{StoreOptions, VolumeStore};

    #[test]
    fn unsuitable_geometries_are_refused() {
        let suitable = xfs::Geometry { flags: xfs::PROJID32, ..xfs::Geometry::default() };
        assert_eq!(geometry_problem(&suitable), None);
        let problem = |geometry| geometry_problem(&geometry).unwrap().to_string();
        assert!(problem(xfs::Geometry { rtblocks: 1, ..suitable }).contains("realtime"));
        assert!(problem(xfs::Geometry { flags: !xfs::PROJID32, ..suitable }).contains("16 bits"));
    }

    #[test]
    fn relative_data_directories_become_absolute() {
        let current = std::env::current_dir().unwrap();
        for (given, expected) in [
            ("data", current.join("data")),
            ("data/", current.join("data")),
            ("./data/.", current.join("data")),
            ("a/data", current.join("a/data")),
            (".", current.canonicalize().unwrap()),
            ("src/..", current.canonicalize().unwrap()),
            ("/var/lib/data", PathBuf::from("/var/lib/data")),
        ] {
            assert_eq!(absolute(Path::new(given)).unwrap(), expected, "{given}");
        }
        for root in ["/", "/..", "/usr/.."] {
            assert_eq!(absolute(Path::new(root)).unwrap_err().kind(), ErrorKind::InvalidInput, "{root}");
        }
    }

    #[test]
    fn a_plain_directory_stays_untouched() {
        let directory = tempfile::tempdir().unwrap();
        let error = DataFilesystem::open(directory.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotMounted, "{error}");
        assert!(error.to_string().contains("prjquota"), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    /// The record of a store beside the mount point shows that the file system was mounted there before.
    #[test]
    fn a_record_distinguishes_lost_mounts() {
        let directory = tempfile::tempdir().unwrap();
        let (path, record) = (directory.path().join("data"), directory.path().join("data.filesystem-uuid"));
        let kind = || {
            let error = VolumeStore::open(&path, StoreOptions::default()).unwrap_err();
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            let existing = VolumeStore::open_existing(&path, StoreOptions::default()).unwrap_err();
            assert_eq!(existing.kind(), error.kind());
            error.kind()
        };
        assert_eq!(kind(), ErrorKind::NeverMounted, "neither directory nor record");
        assert!(!path.exists(), "the data directory was created");
        std::fs::create_dir(&path).unwrap();
        assert_eq!(kind(), ErrorKind::NeverMounted, "no record");
        // Even one that cannot be read: a store was there.
        std::fs::write(record, "").unwrap();
        assert_eq!(kind(), ErrorKind::NotMounted);
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(kind(), ErrorKind::NotMounted, "the mount point is missing too");
    }
}
