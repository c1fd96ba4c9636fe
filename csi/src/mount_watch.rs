//! Changes of the mount table.

use std::fs::File;
use std::os::fd::OwnedFd;

use anyhow::Context;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::async_fd;

/// Reports when a file system is mounted or unmounted in this process's mount namespace. The kernel then makes
/// `/proc/self/mountinfo` readable with priority (proc(5)).
#[derive(Debug)]
pub(crate) struct MountWatch(AsyncFd<OwnedFd>);

impl MountWatch {
    /// Starts the watch.
    ///
    /// # Errors
    /// `/proc` is not mounted, or the process has too many descriptors (EMFILE).
    pub(crate) fn new() -> anyhow::Result<Self> {
        const TABLE: &str = "/proc/self/mountinfo";
        let table = File::open(TABLE).with_context(|| format!("open {TABLE}"))?;
        Ok(Self(
            async_fd::register(table.into(), Interest::PRIORITY).with_context(|| format!("watch {TABLE}"))?,
        ))
    }

    /// Returns when a file system was mounted or unmounted since the last call, or since the start.
    ///
    /// # Errors
    /// The event loop has ended.
    pub(crate) async fn changed(&self) -> anyhow::Result<()> {
        self.0.ready(Interest::PRIORITY).await?.clear_ready();
        Ok(())
    }
}
