//! Refreshes the size of loop devices as soon as their volume was expanded. The kubelet also requests this, once per
//! sync period, which takes a minute and up to half a minute more. The provisioner, which expands the image, therefore
//! waits for this refresh, and falls back to the kubelet only if the refresh does not happen.

use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::Context;
use loopfs::ErrorKind;
use loopfs::volume_store::Changes;
use tokio::io::Interest;
use tokio_util::sync::CancellationToken;

use crate::async_fd;
use crate::backoff::ExponentialBackoff;
use crate::error::Error;
use crate::storage::StorageMonitor;
use crate::volumes::VolumeOperations;

/// Watches the volumes of the storage while it is available, until `stop`.
pub(crate) async fn run(
    operations: VolumeOperations,
    monitor: Arc<StorageMonitor>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let watching = async {
        let mut backoff = ExponentialBackoff::new();
        loop {
            monitor.wait_until_available().await;
            tokio::select! {
                ended = watch_storage(&operations, &monitor) => if let Err(error) = ended {
                    let reason = format!("{error:#}");
                    tracing::warn!(%reason, "could not watch the volumes; until the driver can, expanded Block volumes are refreshed by the kubelet's NodeExpandVolume calls");
                },
                () = monitor.wait_until_unavailable() => {}
            }
            tokio::time::sleep(backoff.next()).await;
        }
    };
    stop.run_until_cancelled(watching).await;
    Ok(())
}

/// Returns when no further changes will be reported.
async fn watch_storage(operations: &VolumeOperations, monitor: &StorageMonitor) -> anyhow::Result<()> {
    let watch = monitor.current()?.store().watch()?;
    let readable = watch.as_fd().try_clone_to_owned().context("duplicate a descriptor")?;
    let readable = async_fd::register(readable, Interest::READABLE).context("watch the volumes")?;
    loop {
        // Cleared before the changes are read, so that changes in the meantime are reported.
        readable.ready(Interest::READABLE).await?.clear_ready();
        let changes = watch.read()?;
        refresh(operations, &changes).await;
        if changes.ended {
            anyhow::bail!("the directory of the volumes was removed");
        }
    }
}

/// Refreshes the devices of the changed volumes. After a failure, the kubelet's next NodeExpandVolume call retries.
async fn refresh(operations: &VolumeOperations, changes: &Changes) {
    if changes.overflowed {
        tracing::warn!(
            "the kernel dropped changes of volumes, because its queue overflowed; the kubelet's NodeExpandVolume calls refresh those volumes"
        );
    }
    for volume in &changes.volumes {
        let id = volume.clone();
        match operations.unlocked(move |volumes| volumes.refresh_devices(&id)).await {
            Ok(None) => {}
            Err(Error::Storage(error)) if error.kind() == ErrorKind::NotFound => {}
            Ok(Some(size)) => {
                tracing::info!(%volume, %size, "refreshed the loop devices of the expanded volume")
            }
            Err(error) => {
                tracing::info!(%volume, %error, "could not refresh the size of the volume's loop devices; the kubelet's next NodeExpandVolume call retries");
            }
        }
    }
}
