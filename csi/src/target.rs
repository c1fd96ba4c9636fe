//! Paths below the kubelet directory, opened without following symbolic links.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use loopfs::ErrorKind;
use loopfs::mount::{Isolation, KnownMount, MountCache, MountFlags, is_mount_point, table as mountinfo};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::error::{Error, Result};
use crate::loop_node::kind_of;
use crate::request::TargetPath;

/// The directories of the kubelet below which volumes are published: the targets of all volumes, and the staging paths
/// of Block volumes.
const PUBLISHED_BELOW: [&str; 2] = ["pods", "plugins"];

/// The kubelet directory, below which volumes are published.
#[derive(Debug)]
pub(crate) struct PublishRoot {
    directory: OwnedFd,
    /// The path without symbolic links, as in `/proc/self/mountinfo`.
    path: PathBuf,
    mounts: Mutex<MountCache>,
}

impl PublishRoot {
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let path = path.canonicalize()?;
        let directory = open(&path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        let mounts = Mutex::new(MountCache::below(path.clone()));
        Ok(Self { directory, path, mounts })
    }

    /// Returns an error if volumes that are published below this directory would not appear on the node. Then every publish
    /// call would succeed, and pods would write to the node's root disk instead of to their volumes.
    pub(crate) fn require_propagation(&self) -> Result<()> {
        let mounts = mountinfo::read()?;
        for directory in self.published_below()? {
            // A process in a changed root directory may not see the mount that holds its directories.
            let Some(mount) = mountinfo::holding(&mounts, &directory) else { continue };
            let Some(isolation) = Isolation::of(mount) else { continue };
            return Err(Error::Precondition(format!(
                "{}: volumes that the driver mounts there do not appear on the node, because this mount {isolation}; in a \
                 container, mount the directory with mountPropagation: Bidirectional (Kubernetes) or \
                 bind-propagation=rshared (Docker); in a systemd service, remove the settings that give the service a mount \
                 namespace, such as PrivateMounts= and PrivateTmp=",
                mount.mount_point.display()
            )));
        }
        Ok(())
    }

    /// Opens the directories [`PUBLISHED_BELOW`], none of which may be a symbolic link: [`locate`](Self::locate) would refuse each volume.
    /// In place of each that does not exist yet, it opens this directory, in which it
    /// will be created.
    fn published_below(&self) -> Result<Vec<OwnedFd>> {
        let open_directory = |name: &str| {
            let path = self.path.join(name);
            let how = OpenHow::new()
                .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
                .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
            match openat2(&self.directory, name, how) {
                Err(Errno::ENOENT) => openat2(&self.directory, ".", how),
                opened => opened,
            }
            .map_err(|errno| match errno {
                Errno::ELOOP => Error::Precondition(format!(
                    "{} is a symbolic link, and the driver follows none below the kubelet's directory; replace it by a directory, and \
                     mount the target of the link there (mount --bind), or move the whole directory of the kubelet (--root-dir)",
                    path.display()
                )),
                errno => Error::Target { operation: "open", path, errno },
            })
        };
        PUBLISHED_BELOW.into_iter().map(open_directory).collect()
    }

    /// Opens the parent directory of `target`. Returns `None` if that directory does not exist.
    pub(crate) fn locate(&self, target: &TargetPath) -> Result<Option<Target>> {
        let path = self.path.join(target.relative());
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        let how =
            OpenHow::new().flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC).resolve(resolve);
        let parent = match target.parent() {
            parent if parent.as_os_str().is_empty() => Path::new("."),
            parent => parent,
        };
        match openat2(&self.directory, parent, how) {
            Ok(parent) => Ok(Some(Target { parent, name: target.name().to_owned(), path })),
            Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
            Err(Errno::ELOOP) => Err(Error::Precondition(format!(
                "{}: the path contains a symbolic link, and the driver follows none below {}",
                path.display(),
                self.path.display()
            ))),
            Err(errno) => Err(Error::Target { operation: "open the directory of", path, errno }),
        }
    }

    /// Returns the mounts below this directory.
    pub(crate) fn mounts(&self) -> Result<Vec<KnownMount>> {
        // A panic while it was locked leaves a cache that has too few mounts, and the next read adds them.
        Ok(self.mounts.lock().unwrap_or_else(PoisonError::into_inner).read()?)
    }
}

/// A path at which a volume is or will be published. The parent directory is held open. Files are therefore created,
/// mounted and removed in that directory, and not in another one that has taken its name.
#[derive(Debug)]
pub(crate) struct Target {
    parent: OwnedFd,
    name: OsString,
    path: PathBuf,
}

impl Target {
    /// Returns the path, for messages and for comparison with mount points.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the status of the root of a mount, or of a symbolic link itself. Returns `None` if nothing exists at the
    /// path.
    pub(crate) fn status(&self) -> Result<Option<FileStat>> {
        match fstatat(&self.parent, self.name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(self.failed("stat", errno)),
        }
    }

    /// Returns the topmost mount at the path.
    pub(crate) fn mount(&self) -> Result<Option<mountinfo::Mount>> {
        // A file system that has shut down does not answer. The table has its mount.
        if let Ok(false) = is_mount_point(&self.parent, &self.name) {
            return Ok(None);
        }
        Ok(mountinfo::at(&mountinfo::read()?, &self.path).cloned())
    }

    /// Creates a directory unless one exists.
    pub(crate) fn ensure_directory(&self) -> Result<()> {
        match mkdirat(&self.parent, self.name.as_os_str(), Mode::S_IRWXU | Mode::S_IRGRP | Mode::S_IXGRP) {
            Ok(()) => Ok(()),
            Err(Errno::EEXIST) => self.require(SFlag::S_IFDIR, "a directory"),
            Err(errno) => Err(self.failed("create the directory", errno)),
        }
    }

    /// Creates an empty file unless a file exists.
    pub(crate) fn ensure_file(&self) -> Result<()> {
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        match openat(&self.parent, self.name.as_os_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(_closed_immediately) => Ok(()),
            Err(Errno::EEXIST) => self.require(SFlag::S_IFREG, "a file"),
            Err(errno) => Err(self.failed("create the file", errno)),
        }
    }

    /// Bind-mounts `source` at the path.
    pub(crate) fn bind_mount(&self, source: BorrowedFd<'_>, flags: MountFlags) -> Result<()> {
        let mounted = loopfs::mount::bind_mount_at(source, &self.parent, Path::new(&self.name), flags);
        self.of_mount(mounted)
    }

    /// Unmounts all mounts at the path. Returns `true` if there was one.
    pub(crate) fn unmount(&self) -> Result<bool> {
        // umount2(2) takes no directory.
        let parent = PathBuf::from(format!("/proc/self/fd/{}", self.parent.as_fd().as_raw_fd()));
        self.of_mount(loopfs::mount::unmount(&parent.join(&self.name)))
    }

    /// Removes the empty directory or empty file that a publish call created. Returns an error for anything else,
    /// because this driver did not create it. Removes a symbolic link itself, without following it.
    pub(crate) fn remove(&self) -> Result<()> {
        let Some(status) = self.status()? else { return Ok(()) };
        let kind = kind_of(&status);
        let how = match kind {
            SFlag::S_IFDIR => UnlinkatFlags::RemoveDir,
            SFlag::S_IFLNK => UnlinkatFlags::NoRemoveDir,
            SFlag::S_IFREG if status.st_size == 0 => UnlinkatFlags::NoRemoveDir,
            _ => {
                return Err(self
                    .precondition_error("was not created by this driver, so it is not removed; remove it"));
            }
        };
        match unlinkat(&self.parent, self.name.as_os_str(), how) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Err(self.precondition_error(
                "is not a mount point, and contains files that the driver does not remove; move them away",
            )),
            Err(Errno::EBUSY) => Err(Error::Temporary(format!(
                "another process has mounted something at {} in the meantime",
                self.path.display()
            ))),
            Err(errno) => Err(self.failed("remove", errno)),
        }
    }

    pub(crate) fn precondition_error(&self, why: &str) -> Error {
        Error::Precondition(format!("{} {why}", self.path.display()))
    }

    fn require(&self, required: SFlag, called: &str) -> Result<()> {
        match self.status()? {
            Some(status) if kind_of(&status) == required => Ok(()),
            Some(_) => {
                Err(self
                    .precondition_error(&format!("is not {called}, which the volume requires; remove it")))
            }
            None => Err(Error::Temporary(format!(
                "another process has removed {} in the meantime",
                self.path.display()
            ))),
        }
    }

    /// Names the path of the request in an error, not the one through the parent directory that is held open.
    fn of_mount<T>(&self, result: loopfs::Result<T>) -> Result<T> {
        result.map_err(|error| match (error.kind(), error.errno()) {
            (ErrorKind::Busy, _) => Error::Temporary(format!("{} is in use", self.path.display())),
            (_, Some(errno)) => self.failed("change the mount of", Errno::from_raw(errno)),
            (_, None) => Error::Storage(error),
        })
    }

    fn failed(&self, operation: &'static str, errno: Errno) -> Error {
        Error::Target { operation, path: self.path.clone(), errno }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;
    use crate::proto::csi::NodeUnpublishVolumeRequest;
    use crate::request::RequestReader;
    use crate::topology::ThisNode;

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
            let driver_name = "a.b".parse().unwrap();
            let node = ThisNode::new(&driver_name, "node".to_owned());
            let reader = RequestReader::new(&driver_name, node, self.directory.path());
            let target_path = self.path(relative).to_str().unwrap().to_owned();
            let request = NodeUnpublishVolumeRequest { volume_id: "v".to_owned(), target_path };
            self.root.locate(&reader.unpublish(&request).unwrap().target)
        }

        fn locate(&self, relative: &str) -> Target {
            self.try_locate(relative).unwrap().unwrap()
        }
    }

    #[test]
    fn creating_and_removing_a_target_is_idempotent() {
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
    fn files_that_the_driver_did_not_create_are_kept() {
        let scratch = scratch();
        fs::write(scratch.path("file"), "precious").unwrap();
        fs::create_dir(scratch.path("directory")).unwrap();
        fs::write(scratch.path("directory/file"), "precious").unwrap();
        for name in ["file", "directory"] {
            let error = scratch.locate(name).remove().unwrap_err();
            assert!(matches!(&error, Error::Precondition(_)), "{error}");
        }
        assert!(matches!(scratch.locate("file").ensure_directory(), Err(Error::Precondition(_))));
        assert!(matches!(scratch.locate("directory").ensure_file(), Err(Error::Precondition(_))));
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
        assert!(matches!(&error, Error::Precondition(text) if text.contains("symbolic link")), "{error}");
        let target = scratch.locate("target");
        assert!(target.ensure_file().is_err() && target.ensure_directory().is_err());
        target.remove().unwrap();
        assert!(!scratch.path("target").is_symlink() && outside.path().join("file").exists());
    }

    #[test]
    fn a_linked_directory_of_the_kubelet_is_refused() {
        let (scratch, outside) = (scratch(), tempfile::tempdir().unwrap());
        symlink(outside.path(), scratch.path("pods")).unwrap();
        let error = scratch.root.require_propagation().unwrap_err().to_string();
        assert!(error.contains("/pods is a symbolic link") && error.contains("mount --bind"), "{error}");
    }

    #[test]
    fn a_target_without_a_parent_directory_is_not_found() {
        let scratch = scratch();
        fs::write(scratch.path("file"), "").unwrap();
        assert!(scratch.try_locate("absent/target").unwrap().is_none());
        assert!(scratch.try_locate("file/target").unwrap().is_none());
    }

    #[test]
    fn a_target_stays_in_its_parent_directory_after_a_rename() {
        let scratch = scratch();
        fs::create_dir(scratch.path("pod")).unwrap();
        let target = scratch.locate("pod/target");
        fs::rename(scratch.path("pod"), scratch.path("moved")).unwrap();
        fs::create_dir(scratch.path("pod")).unwrap();
        target.ensure_directory().unwrap();
        assert!(scratch.path("moved/target").is_dir() && !scratch.path("pod/target").exists());
    }
}
