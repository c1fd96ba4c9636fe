//! The node's part in the expansion of a volume: its loop devices.

use loopfs::Bytes;
use loopfs::publish::Publisher;
use loopfs::volume_store::Volume;

use super::publish::Volumes;
use super::stats::not_published;
use super::volume::require_kind;
use crate::error::{Error, Result};
use crate::request::{CapacityRange, NodeExpand, TargetPath};

impl Volumes {
    /// Refreshes the size of the volume's loop devices, and returns the size that the volume has on this node. Does not
    /// expand the image or the quota: ControllerExpandVolume or the provisioner does.
    pub(crate) fn node_expand(&self, expand: &NodeExpand) -> Result<Bytes> {
        let publisher = self.monitor.verified()?;
        let volume = publisher.store().volume(&expand.volume)?;
        if let Some(access_type) = expand.access_type {
            require_kind(&volume, access_type.kind())?;
        }
        if !expand.is_staging_path {
            self.require_published(&volume, &publisher, expand.path.as_ref())?;
        }
        let size = publisher.refresh(&volume)?;
        let CapacityRange { required, limit } = expand.capacity;
        match (required, limit) {
            (Some(required), _) if size < required => Err(Error::Temporary(format!(
                "volume {} has {size} on this node, but {required} are required; expand the volume itself first",
                expand.volume
            ))),
            (_, Some(limit)) if size > limit => Err(Error::OutOfRange(format!(
                "volume {} has {size} already, which is above the limit of {limit}",
                expand.volume
            ))),
            _ => Ok(size),
        }
    }

    /// Returns an error unless the volume is published at this path, or is published and nothing is at the path.
    ///
    /// The kubelet knows one path for each Block volume, that of the pod which mapped it last. After that pod has ended, the
    /// kubelet still names its path while other pods of the node use the volume, and would repeat a call that fails.
    fn require_published(
        &self,
        volume: &Volume,
        publisher: &Publisher,
        path: Option<&TargetPath>,
    ) -> Result<()> {
        let refused = || not_published(volume.id(), path);
        let target = self.root.locate(path.ok_or_else(refused)?.relative())?;
        let is_there = match target {
            Some(target) => publisher.is_at(volume, &target)?,
            None => None,
        };
        let is_published = match is_there {
            Some(is_there) => is_there,
            None => publisher.published_at(volume)?.is_some(),
        };
        if is_published { Ok(()) } else { Err(refused()) }
    }
}
