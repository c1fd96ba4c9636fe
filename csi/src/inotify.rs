//! Changes of directories (inotify(7)).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::Context;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::async_fd;

/// A watch on directories. It reports that something changed, and the caller looks what.
#[derive(Debug)]
pub(crate) struct InotifyWatch {
    inotify: Inotify,
    /// A duplicate of the inotify descriptor.
    readable: AsyncFd<OwnedFd>,
}

impl InotifyWatch {
    /// Returns a value that watches nothing yet.
    ///
    /// # Errors
    /// EMFILE: this user has too many instances (`fs.inotify.max_user_instances`), or this process too many descriptors.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let context = "create an inotify instance; see fs.inotify.max_user_instances";
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).context(context)?;
        let duplicate = inotify.as_fd().try_clone_to_owned().context(context)?;
        let readable = async_fd::register(duplicate, Interest::READABLE).context(context)?;
        Ok(Self { inotify, readable })
    }

    /// Watches the names in a directory.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR: there is no such directory. ENOSPC: this user has too many watches (`fs.inotify.max_user_watches`).
    pub(crate) fn add_directory(&self, directory: &Path) -> anyhow::Result<()> {
        let events = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        self.inotify
            .add_watch(directory, events)
            .map(drop)
            .with_context(|| format!("watch {}; see fs.inotify.max_user_watches", directory.display()))
    }

    /// Returns when something has changed since the last call. Returns `true` if a watched directory was itself
    /// deleted or moved: another one may have its path, which this value does not watch.
    ///
    /// # Errors
    /// The event loop has ended.
    pub(crate) async fn changed(&self) -> anyhow::Result<bool> {
        let gone = AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        loop {
            let mut ready = self.readable.readable().await?;
            if let Ok(events) = ready.try_io(|_| Ok(self.inotify.read_events()?)) {
                let events = events.context("read inotify events")?;
                return Ok(events.iter().any(|event| event.mask.intersects(gone)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn recreated_directory_needs_new_watch() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("d");
        fs::create_dir(&directory).unwrap();
        let watch = InotifyWatch::new().unwrap();
        watch.add_directory(&directory).unwrap();
        fs::write(directory.join("file"), "").unwrap();
        assert!(!watch.changed().await.unwrap());
        fs::remove_dir_all(&directory).unwrap();
        fs::create_dir(&directory).unwrap();
        assert!(watch.changed().await.unwrap());
    }
}
