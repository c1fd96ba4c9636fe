//! Reads of the volumes' disk, which may be the fault that is looked for.

use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use tokio::sync::Semaphore;

/// The longest time for one read.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// Reads that may run concurrently. A read of a disk that hangs never ends, and keeps its thread.
pub(crate) const MAX_READS: usize = 4;

/// The reads that may run.
#[derive(Clone, Debug)]
pub(crate) struct Disk(Arc<Semaphore>);

impl Default for Disk {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_READS)))
    }
}

impl Disk {
    /// Runs a read that may block.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let Ok(permit) = Arc::clone(&self.0).try_acquire_owned() else {
            bail!("{MAX_READS} reads of the disk have not ended; the disk may hang");
        };
        let reading = move || {
            let _permit = permit;
            read()
        };
        in_time(reading).await
    }
}

/// Runs a read that may block. After the timeout, it keeps its thread and what it has.
pub(crate) async fn in_time<T: Send + 'static>(
    read: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    match tokio::time::timeout(READ_TIMEOUT, tokio::task::spawn_blocking(read)).await {
        Ok(read) => read?,
        Err(_elapsed) => bail!("no result within {READ_TIMEOUT:?}; the disk may hang"),
    }
}
