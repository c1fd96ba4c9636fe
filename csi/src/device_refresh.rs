//! Loop devices refresh a larger image as soon as it has expanded. The kubelet asks for that too, once in its sync period, which is a
//! minute and up to half of it more; so whoever grew the image waits for this, and for the kubelet only where nobody answers.

use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::Context;
use loopfs::{Changes, ErrorKind};
use tokio::io::Interest;
use tokio_util::sync::CancellationToken;

use crate::async_fd;
use crate::backoff::Backoff;
use crate::error::Error;
use crate::storage::StorageMonitor;
use crate::volumes::VolumeOperations;

/// Follows the volumes of whichever storage is open, until `stop`.
pub(crate) async fn run(
    operations: VolumeOperations,
    monitor: Arc<StorageMonitor>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let following = async {
        let mut backoff = Backoff::new();
        loop {
            monitor.wait_until_available().await;
            tokio::select! {
                ended = follow_storage(&operations, &monitor) => if let Err(error) = ended {
                    let reason = format!("{error:#}");
                    tracing::warn!(%reason, "block volumes that grow are seen when the kubelet looks");
                },
                () = monitor.wait_until_unavailable() => {}
            }
            tokio::time::sleep(backoff.next()).await;
        }
    };
    stop.run_until_cancelled(following).await;
    Ok(())
}

/// Ends when nothing more will be seen.
async fn follow_storage(operations: &VolumeOperations, monitor: &StorageMonitor) -> anyhow::Result<()> {
    let watch = monitor.current()?.store.watch()?;
    let readable = watch.as_fd().try_clone_to_owned().context("duplicate a descriptor")?;
    let readable = async_fd::register(readable, Interest::READABLE).context("watch the volumes")?;
    loop {
        // Cleared before it is read, so that what comes meanwhile is seen.
        readable.ready(Interest::READABLE).await?.clear_ready();
        let changes = watch.read().context("read what changed about the volumes")?;
        refresh(operations, &changes).await;
        if changes.ended {
            anyhow::bail!("the directory of the volumes is gone");
        }
    }
}

/// What cannot be done now is the kubelet's to ask for.
async fn refresh(operations: &VolumeOperations, changes: &Changes) {
    if changes.overflowed {
        tracing::warn!(
            "more volumes changed at once than the kernel remembers; the kubelet has the others looked at"
        );
    }
    for volume in &changes.volumes {
        let id = volume.clone();
        match operations.unlocked(move |volumes| volumes.refresh_devices(&id)).await {
            Ok(None) => {}
            Err(Error::Storage(error)) if error.kind() == ErrorKind::NotFound => {}
            Ok(Some(size)) => {
                tracing::info!(%volume, %size, "the devices of the volume refresh that it has expanded")
            }
            Err(error) => {
                tracing::info!(%volume, %error, "the devices are told of the volume's size when the kubelet asks");
            }
        }
    }
}
