//! The directory below which volumes are published, and paths in it, opened without following symbolic links.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::mounted::{MountedDevices, is_loop_device, kind_of, number_of};
use crate::DeviceNumber;
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::keyed_lock::KeyedLocks;
use crate::mount::{
    Isolation, KnownMount, MountCache, MountFlags, bind_mount_at, is_mount_point, table as mountinfo, unmount,
};
use crate::volume_store::VolumeId;

/// The directory below which volumes are published. Every target is in it, and no symbolic link leads to one.
#[derive(Debug)]
pub struct PublishRoot {
    directory: OwnedFd,
    /// The path without symbolic links, as in `/proc/self/mountinfo`.
    path: PathBuf,
    /// All mounts of the mount namespace.
    mounts: Mutex<MountCache>,
    /// The volumes and targets that calls of this process change. A call that locks a volume and a target locks the volume first.
    pub(super) volume_locks: KeyedLocks<VolumeId>,
    pub(super) target_locks: KeyedLocks<PathBuf>,
}

impl PublishRoot {
    /// Opens the directory.
    ///
    /// # Errors
    /// Those of realpath(3) and open(2).
    pub fn open(path: &Path) -> Result<Self> {
        let path = path.canonicalize().context("open", path.display())?;
        let directory = open(&path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
            .context("open", path.display())?;
        let mounts = Mutex::new(MountCache::below("/".into()));
        let (volume_locks, target_locks) = Default::default();
        Ok(Self { directory, path, mounts, volume_locks, target_locks })
    }

    /// Returns the path of the directory without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that what is mounted in these directories appears on the machine, and not only in the mount namespace of this process.
    /// Otherwise each volume would be published, and its users would write to the disk below it. `directories` are relative to the root.
    /// One that does not exist yet counts as the root, in which it will be created.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: a mount does not propagate, or one of the directories is a symbolic link, so that no volume could be
    /// published below it.
    pub fn require_propagation(&self, directories: &[&str]) -> Result<()> {
        let mounts = mountinfo::read()?;
        for name in directories {
            let directory = self.open_directory(name)?;
            // A process in a changed root directory may not see the mount that holds its directories.
            let Some(mount) = mountinfo::holding(&mounts, &directory) else { continue };
            let Some(isolation) = Isolation::of(mount) else { continue };
            let place = mount.mount_point.display();
            let cause = format!("they do not appear on the node, because this mount {isolation}");
            return Err(Error::new(ErrorKind::Conflict, "publish volumes below", place, cause).with_remedy(
                "in a container, mount the directory with mountPropagation: Bidirectional (Kubernetes) or \
                 bind-propagation=rshared (Docker); in a systemd service, remove the settings that give the service a mount \
                 namespace, such as PrivateMounts= and PrivateTmp=",
            ));
        }
        Ok(())
    }

    fn open_directory(&self, name: &str) -> Result<OwnedFd> {
        let path = self.path.join(name);
        let opened = match self.open_beneath(Path::new(name)) {
            Err(Errno::ENOENT) => self.open_beneath(Path::new(".")),
            opened => opened,
        };
        opened.map_err(|errno| match errno {
            Errno::ELOOP => Error::new(
                ErrorKind::Conflict,
                "open",
                path.display(),
                "it is a symbolic link, and none is followed there",
            )
            .with_remedy(
                "replace it by a directory, and mount the target of the link there (mount --bind), or move the whole directory \
                 above it",
            ),
            errno => Error::sys("open", path.display(), errno),
        })
    }

    /// Opens a directory by its path relative to the root. Follows no symbolic link.
    fn open_beneath(&self, path: &Path) -> std::result::Result<OwnedFd, Errno> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
        openat2(&self.directory, path, how)
    }

    /// Returns the path of a target, which is relative to the root or below it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the path has no name, leads outside, or contains `..`.
    fn path_of(&self, target: &Path) -> Result<PathBuf> {
        let invalid =
            |detail: String| Error::new(ErrorKind::InvalidInput, "find the target", target.display(), detail);
        let relative = match target.strip_prefix(&self.path) {
            Err(_) if target.is_absolute() => {
                return Err(invalid(format!("it must be below {}", self.path.display())));
            }
            Err(_) => target,
            Ok(relative) => relative,
        };
        // Rebuilt, without `//` and `.`.
        let relative: PathBuf =
            relative.components().filter(|component| *component != Component::CurDir).collect();
        let is_normal = relative.components().all(|component| matches!(component, Component::Normal(_)));
        if relative.file_name().is_none() || !is_normal {
            return Err(invalid("it must name something below the directory, without ..".to_owned()));
        }
        Ok(self.path.join(relative))
    }

    /// Opens the parent directory of a target, whose path is relative to the root or begins with that of the root. Returns `None` if that
    /// directory does not exist.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the path leads outside. [`ErrorKind::Conflict`]: it contains a symbolic link.
    pub fn locate(&self, target: &Path) -> Result<Option<Target>> {
        let path = self.path_of(target)?;
        let relative = path.strip_prefix(&self.path).unwrap_or(&path);
        let parent = match relative.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let name = path.file_name().unwrap_or_default().to_owned();
        match self.open_beneath(parent) {
            Ok(parent) => Ok(Some(Target { parent, name, path })),
            Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
            Err(Errno::ELOOP) => Err(Error::new(
                ErrorKind::Conflict,
                "find the target",
                path.display(),
                format!(
                    "the path contains a symbolic link, and none is followed below {}",
                    self.path.display()
                ),
            )),
            Err(errno) => {
                Err(Error::sys("open the directory of", path.display(), errno).with_kind(ErrorKind::Other))
            }
        }
    }

    /// Returns the mounts below this directory.
    ///
    /// # Errors
    /// Those of reading `/proc/self/mountinfo`.
    pub fn mounts(&self) -> Result<Vec<KnownMount>> {
        let mut mounts = self.all_mounts()?;
        mounts.retain(|mount| mount.mount_point.starts_with(&self.path));
        Ok(mounts)
    }

    /// Returns the mounted nodes of loop devices, wherever they are: another program may have published the device of a volume too.
    pub(super) fn mounted_devices(&self) -> Result<MountedDevices> {
        MountedDevices::among(&self.all_mounts()?)
    }

    fn all_mounts(&self) -> Result<Vec<KnownMount>> {
        // A panic while it was locked leaves a cache that has too few mounts, and the next read adds them.
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner).read()
    }

    /// Unmounts and removes a target, whatever is mounted there: the first part of [`Publisher::unpublish`](super::Publisher::unpublish).
    /// It neither reads nor writes the disk of the volumes, and waits for no call that does, so the user of a volume can end while the disk
    /// hangs. Succeeds if there is nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: a process of this mount namespace has a file open there, or its working directory. [`ErrorKind::Conflict`]: at
    /// the path is a file or a directory with content. An empty one counts as created by a call, and so does a symbolic link, which is
    /// removed itself.
    pub fn clear(&self, target: &Path) -> Result<ClearedTarget> {
        self.clear_if(target, |_target| Ok(()))
    }

    /// As [`clear`](Self::clear), unless `check` fails, during which no call of this process changes the target.
    pub(super) fn clear_if(
        &self,
        target: &Path,
        check: impl FnOnce(&Target) -> Result<()>,
    ) -> Result<ClearedTarget> {
        let _lock = self.target_locks.lock(self.path_of(target)?);
        let Some(target) = self.locate(target)? else { return Ok(ClearedTarget::default()) };
        check(&target)?;
        // The status of a mount whose file system has failed cannot be determined. It is then not the node of a loop device, because
        // nodes are on a file system without a disk.
        let status = target.status().ok().flatten();
        target.unmount()?;
        target.remove()?;
        Ok(ClearedTarget { status })
    }
}

/// What was at a target before it was cleared.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClearedTarget {
    pub(super) status: Option<FileStat>,
}

/// A path at which a volume is or will be published. The parent directory is held open. Files are therefore created,
/// mounted and removed in that directory, and not in another one that has taken its name.
#[derive(Debug)]
pub struct Target {
    parent: OwnedFd,
    name: OsString,
    path: PathBuf,
}

impl Target {
    /// Returns the path, for messages and for comparison with mount points.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the device of the file system that contains the path.
    pub(super) fn directory_device(&self) -> Result<DeviceNumber> {
        let status = fstat(&self.parent).map_err(|errno| self.failed("stat the directory of", errno))?;
        Ok(DeviceNumber::from_raw(status.st_dev))
    }

    /// Returns the path of the target in its file system, whatever part of that is mounted.
    pub(super) fn place_on_its_filesystem(&self) -> Result<PathBuf> {
        let mounts = mountinfo::read()?;
        Ok(match mountinfo::holding(&mounts, &self.parent) {
            Some(mount) => match self.path.strip_prefix(&mount.mount_point) {
                Ok(rest) => mount.root.join(rest),
                Err(_) => mount.root.clone(),
            },
            None => self.path.clone(),
        })
    }

    /// Returns the number of the loop device whose node is at the path.
    ///
    /// # Errors
    /// Those of stat(2).
    pub fn loop_device(&self) -> Result<Option<DeviceNumber>> {
        Ok(self.status()?.filter(is_loop_device).map(|status| number_of(&status)))
    }

    /// Returns the status of the root of a mount, or of a symbolic link itself. Returns `None` if nothing exists at the
    /// path.
    pub(super) fn status(&self) -> Result<Option<FileStat>> {
        match fstatat(&self.parent, self.name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(self.failed("stat", errno)),
        }
    }

    /// Returns the topmost mount at the path.
    ///
    /// # Errors
    /// Those of reading `/proc/self/mountinfo`.
    pub fn mount(&self) -> Result<Option<mountinfo::Mount>> {
        // A file system that has shut down does not answer. The table has its mount.
        if let Ok(false) = is_mount_point(&self.parent, &self.name) {
            return Ok(None);
        }
        Ok(mountinfo::at(&mountinfo::read()?, &self.path).cloned())
    }

    /// Creates a directory unless one exists.
    pub(super) fn ensure_directory(&self) -> Result<()> {
        match mkdirat(&self.parent, self.name.as_os_str(), Mode::S_IRWXU | Mode::S_IRGRP | Mode::S_IXGRP) {
            Ok(()) => Ok(()),
            Err(Errno::EEXIST) => self.require(SFlag::S_IFDIR, "an empty directory"),
            Err(errno) => Err(self.failed("create the directory", errno)),
        }
    }

    /// Creates an empty file unless a file exists.
    pub(super) fn ensure_file(&self) -> Result<()> {
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        match openat(&self.parent, self.name.as_os_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(_closed_immediately) => Ok(()),
            Err(Errno::EEXIST) => self.require(SFlag::S_IFREG, "an empty file"),
            Err(errno) => Err(self.failed("create the file", errno)),
        }
    }

    /// Bind-mounts `source` at the path.
    pub(super) fn bind_mount(&self, source: BorrowedFd<'_>, flags: MountFlags) -> Result<()> {
        let mounted = bind_mount_at(source, &self.parent, Path::new(&self.name), flags);
        self.of_mount(mounted)
    }

    /// Unmounts all mounts at the path. Returns `true` if there was one.
    pub(super) fn unmount(&self) -> Result<bool> {
        // umount2(2) takes no directory.
        let parent = PathBuf::from(format!("/proc/self/fd/{}", self.parent.as_fd().as_raw_fd()));
        self.of_mount(unmount(&parent.join(&self.name)))
    }

    /// Removes the empty directory or empty file that a publish call created. Returns an error for anything else,
    /// because no publish call created it. Removes a symbolic link itself, without following it.
    pub(super) fn remove(&self) -> Result<()> {
        let Some(status) = self.status()? else { return Ok(()) };
        let kind = kind_of(&status);
        let how = match kind {
            SFlag::S_IFDIR => UnlinkatFlags::RemoveDir,
            SFlag::S_IFLNK => UnlinkatFlags::NoRemoveDir,
            SFlag::S_IFREG if status.st_size == 0 => UnlinkatFlags::NoRemoveDir,
            _ => {
                let cause = "it was not created to publish a volume, so it is not removed";
                return Err(self.conflict(cause).with_remedy("remove it"));
            }
        };
        match unlinkat(&self.parent, self.name.as_os_str(), how) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Err(self
                .conflict("it is not a mount point, and contains files, which are not removed")
                .with_remedy("move them away")),
            Err(Errno::EBUSY) => Err(self
                .changed("another process has mounted something there in the meantime")
                .with_remedy("retry")),
            Err(errno) => Err(self.failed("remove", errno)),
        }
    }

    pub(super) fn conflict(&self, why: impl Into<Explanation>) -> Error {
        Error::new(ErrorKind::Conflict, "use the target", self.path.display(), why)
    }

    fn changed(&self, cause: &'static str) -> Error {
        Error::new(ErrorKind::Busy, "change the target", self.path.display(), cause)
    }

    fn require(&self, required: SFlag, called: &str) -> Result<()> {
        match self.status()? {
            Some(status) if kind_of(&status) == required => {
                if self.is_empty(&status)? {
                    return Ok(());
                }
                let cause = format!("it is not {called}: the volume would cover its content");
                Err(self.conflict(cause).with_remedy("move that away"))
            }
            Some(_) => {
                let cause = format!("it is not {called}, which the volume requires");
                Err(self.conflict(cause).with_remedy("remove it"))
            }
            None => Err(self.changed("another process has removed it in the meantime").with_remedy("retry")),
        }
    }

    /// Returns `true` if a file or directory has no content, which unpublishing would not remove.
    fn is_empty(&self, status: &FileStat) -> Result<bool> {
        if kind_of(status) == SFlag::S_IFREG {
            return Ok(status.st_size == 0);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let list = |errno| self.failed("list", errno);
        let mut directory =
            Dir::openat(&self.parent, self.name.as_os_str(), flags, Mode::empty()).map_err(list)?;
        for entry in directory.iter() {
            if !matches!(entry.map_err(list)?.file_name().to_bytes(), b"." | b"..") {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Names the path of the request in an error, not the one through the parent directory that is held open.
    fn of_mount<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match (error.kind(), error.errno()) {
            (ErrorKind::Busy, _) => self
                .changed("it is in use: a process has a file open there, or its working directory")
                .with_remedy("end it, or retry"),
            (_, Some(errno)) => self.failed("change the mount of", Errno::from_raw(errno)),
            (_, None) => error,
        })
    }

    fn failed(&self, operation: &'static str, errno: Errno) -> Error {
        Error::sys(operation, self.path.display(), errno).with_kind(ErrorKind::Other)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    struct Scratch {
        directory: TempDir,
        root: PublishRoot,
    }

    fn scratch() -> Scratch {
        let directory = tempfile::tempdir().unwrap();
        let root = PublishRoot::open(directory.path()).unwrap();
        Scratch { directory, root }
    }

    impl Scratch {
        fn path(&self, relative: &str) -> PathBuf {
            self.directory.path().join(relative)
        }

        fn try_locate(&self, relative: &str) -> Result<Option<Target>> {
            self.root.locate(Path::new(relative))
        }

        fn locate(&self, relative: &str) -> Target {
            self.try_locate(relative).unwrap().unwrap()
        }
    }

    #[test]
    fn creation_and_removal_are_idempotent() {
        let scratch = scratch();
        for (name, make) in
            [("d", Target::ensure_directory as fn(&Target) -> Result<()>), ("f", Target::ensure_file)]
        {
            let target = scratch.locate(name);
            make(&target).unwrap();
            make(&target).unwrap();
            assert!(scratch.path(name).exists());
            target.remove().unwrap();
            target.remove().unwrap();
            assert!(!scratch.path(name).exists());
        }
    }

    #[test]
    fn files_of_other_programs_are_kept() {
        let scratch = scratch();
        fs::write(scratch.path("file"), "precious").unwrap();
        fs::create_dir(scratch.path("directory")).unwrap();
        fs::write(scratch.path("directory/file"), "precious").unwrap();
        for name in ["file", "directory"] {
            let error = scratch.locate(name).remove().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        }
        let refused = [scratch.locate("file").ensure_directory(), scratch.locate("directory").ensure_file()];
        assert!(refused.into_iter().all(|refused| refused.unwrap_err().kind() == ErrorKind::Conflict));
        assert_eq!(fs::read_to_string(scratch.path("file")).unwrap(), "precious");
        assert_eq!(fs::read_to_string(scratch.path("directory/file")).unwrap(), "precious");
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let (scratch, outside) = (scratch(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("file"), "").unwrap();
        symlink(outside.path(), scratch.path("way")).unwrap();
        symlink(outside.path().join("file"), scratch.path("target")).unwrap();

        let error = scratch.try_locate("way/target").unwrap_err();
        assert!(
            error.kind() == ErrorKind::Conflict && error.to_string().contains("symbolic link"),
            "{error}"
        );
        let target = scratch.locate("target");
        assert!(target.ensure_file().is_err() && target.ensure_directory().is_err());
        target.remove().unwrap();
        assert!(!scratch.path("target").is_symlink() && outside.path().join("file").exists());
    }

    #[test]
    fn a_linked_directory_is_refused() {
        let (scratch, outside) = (scratch(), tempfile::tempdir().unwrap());
        symlink(outside.path(), scratch.path("pods")).unwrap();
        let error = scratch.root.require_propagation(&["pods"]).unwrap_err().to_string();
        assert!(error.contains("/pods: it is a symbolic link") && error.contains("mount --bind"), "{error}");
    }

    #[test]
    fn a_target_is_below_the_root() {
        let scratch = scratch();
        for target in ["", ".", "..", "a/..", "../a", "/", "/etc/passwd"] {
            let error = scratch.try_locate(target).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{target}: {error}");
        }
        let root = scratch.root.path.clone();
        assert!(scratch.root.locate(&root).is_err() && scratch.root.locate(&root.join("../a")).is_err());
        assert_eq!(scratch.root.locate(&root.join("./a/")).unwrap().unwrap().path(), root.join("a"));
    }

    #[test]
    fn a_target_needs_a_parent_directory() {
        let scratch = scratch();
        fs::write(scratch.path("file"), "").unwrap();
        assert!(scratch.try_locate("absent/target").unwrap().is_none());
        assert!(scratch.try_locate("file/target").unwrap().is_none());
    }

    #[test]
    fn a_target_follows_its_renamed_parent() {
        let scratch = scratch();
        fs::create_dir(scratch.path("pod")).unwrap();
        let target = scratch.locate("pod/target");
        fs::rename(scratch.path("pod"), scratch.path("moved")).unwrap();
        fs::create_dir(scratch.path("pod")).unwrap();
        target.ensure_directory().unwrap();
        assert!(scratch.path("moved/target").is_dir() && !scratch.path("pod/target").exists());
    }
}
