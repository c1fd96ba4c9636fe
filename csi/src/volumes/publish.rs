//! Staging and publishing volumes, and the reverse operations.

use std::sync::Arc;

use loopfs::loop_device::Access;
use loopfs::publish::{Cleanup, ClearedTarget, PublishRoot, Publisher};
use loopfs::volume_store::VolumeId;

use super::volume::require_kind;
use crate::background::TrashCleanup;
use crate::changes::Changes;
use crate::error::{Error, Result};
use crate::request::{AccessType, Publish, Stage, TargetPath, Unstage};
use crate::storage::{StorageMonitor, require_filesystem};

/// The volumes of this node.
#[derive(Debug)]
pub(crate) struct Volumes {
    pub(super) monitor: Arc<StorageMonitor>,
    pub(super) root: Arc<PublishRoot>,
    pub(super) trash_cleanup: Arc<TrashCleanup>,
    pub(super) changes: Arc<Changes>,
}

impl Volumes {
    pub(crate) fn new(
        monitor: Arc<StorageMonitor>,
        root: Arc<PublishRoot>,
        trash_cleanup: Arc<TrashCleanup>,
        changes: Arc<Changes>,
    ) -> Self {
        Self { monitor, root, trash_cleanup, changes }
    }

    /// Verifies and returns the storage.
    pub(crate) fn verified(&self) -> Result<Arc<Publisher>> {
        self.monitor.verified()
    }

    /// Stages a volume: attaches the device of a Block volume. Publishing does the same if it is necessary, because
    /// staging may not have survived a reboot and an orchestrator need not repeat it.
    pub(crate) fn stage(&self, stage: &Stage) -> Result<()> {
        let publisher = self.monitor.verified()?;
        require_filesystem(&publisher, stage.filesystem)?;
        match stage.capability.access_type {
            AccessType::Mount(_) => {
                require_kind(&publisher.store().volume(&stage.volume)?, stage.capability.access_type.kind())
            }
            AccessType::Block => {
                let access = if stage.capability.read_only { Access::ReadOnly } else { Access::ReadWrite };
                Ok(publisher.attach(&stage.volume, access)?)
            }
        }
    }

    /// Detaches the devices of a volume that is published nowhere. The error is [`Error::StorageUnavailable`] if the storage is the
    /// cause.
    pub(crate) fn unstage(&self, unstage: &Unstage) -> Result<Cleanup> {
        let publisher = self.monitor.current()?;
        publisher.detach(&unstage.volume).map_err(|error| self.storage_error_or(error))
    }

    pub(crate) fn publish(&self, publish: &Publish) -> Result<()> {
        let publisher = self.monitor.verified()?;
        require_filesystem(&publisher, publish.filesystem)?;
        let target = publish.target.relative();
        let published = if publish.single_target {
            publisher.publish_only_at(&publish.volume, target, publish.mode)
        } else {
            publisher.publish(&publish.volume, target, publish.mode)
        };
        Ok(published?)
    }

    /// Unmounts and removes the target, whatever is mounted there and even if the volume or the storage no longer
    /// exists. An orchestrator has no other way to stop a workload.
    pub(crate) fn clear_target(&self, target: &TargetPath) -> Result<ClearedTarget> {
        Ok(self.root.clear(target.relative())?)
    }

    /// Cleans up after a volume was unpublished from a target. The error is [`Error::StorageUnavailable`] if the storage is the cause.
    pub(crate) fn clean_up(&self, id: &VolumeId, cleared: &ClearedTarget) -> Result<Cleanup> {
        let publisher = self.monitor.current()?;
        publisher.clean_up(id, cleared).map_err(|error| self.storage_error_or(error))
    }

    /// Closes the devices of a volume that are mounted nowhere. While the storage is unavailable, an administrator could otherwise neither
    /// detach them nor unmount the disk.
    pub(crate) fn release_unmounted(&self, id: &VolumeId) {
        let Some(devices) = self.monitor.devices() else { return };
        if let Err(error) = devices.release_unmounted(id, &self.root) {
            tracing::warn!(volume = %id, %error, "the driver keeps the loop devices of the volume open");
        }
    }

    /// Returns the error of the storage if it has failed, because that has probably caused `error`.
    fn storage_error_or(&self, error: loopfs::Error) -> Error {
        self.monitor.verified().err().unwrap_or_else(|| error.into())
    }
}
