//! A volume on the node, and the calls that the kubelet makes for it.

use std::path::PathBuf;

use loopfs::volume_store::VolumeKind;

use crate::Result;
use crate::support::{
    Client, Directories, capability_of, controller_expand, create, delete, expand, publish, stage, stats,
    unpublish, unstage,
};

const SIZE: i64 = 1 << 20;
/// Each expansion adds this number of bytes: one block.
const EXPANSION: i64 = 4096;

pub(crate) const KINDS: [VolumeKind; 2] = [VolumeKind::Filesystem, VolumeKind::Block];

pub(crate) struct Volume {
    id: String,
    kind: VolumeKind,
    size: i64,
    staging: PathBuf,
    target: PathBuf,
}

impl Volume {
    /// Creates a volume of 1 MiB that is not staged.
    pub(crate) fn create(
        client: &Client,
        directories: &Directories,
        name: &str,
        kind: VolumeKind,
    ) -> Result<Volume> {
        let created = client.create_volume(create(name, SIZE, capability_of(kind)))?;
        let id = created.volume.ok_or("CreateVolume returned no volume")?.volume_id;
        let path = |place: &str| directories.kubelet.join(format!("{place}-{name}"));
        Ok(Volume { id, kind, size: SIZE, staging: path("staging"), target: path("target") })
    }

    pub(crate) fn delete(&self, client: &Client) -> Result<()> {
        client.delete_volume(delete(&self.id))?;
        Ok(())
    }

    pub(crate) fn stage(&self, client: &Client) -> Result<()> {
        client.node_stage_volume(stage(&self.id, &self.staging, capability_of(self.kind)))?;
        Ok(())
    }

    pub(crate) fn unstage(&self, client: &Client) -> Result<()> {
        client.node_unstage_volume(unstage(&self.id, &self.staging))?;
        Ok(())
    }

    pub(crate) fn publish(&self, client: &Client) -> Result<()> {
        client.node_publish_volume(publish(&self.id, &self.target, capability_of(self.kind)))?;
        Ok(())
    }

    pub(crate) fn unpublish(&self, client: &Client) -> Result<()> {
        client.node_unpublish_volume(unpublish(&self.id, &self.target))?;
        Ok(())
    }

    /// Returns an error if the response has no usage, because an empty one would be fast for a wrong reason.
    pub(crate) fn stats(&self, client: &Client) -> Result<()> {
        let response = client.node_get_volume_stats(stats(&self.id, &self.target))?;
        if response.usage.is_empty() {
            return Err(format!("NodeGetVolumeStats of volume {} returned no usage", self.id).into());
        }
        Ok(())
    }

    /// Expands the image or the quota, as the provisioner does before the kubelet calls.
    pub(crate) fn expand_on_disk(&mut self, client: &Client) -> Result<()> {
        self.size += EXPANSION;
        client.controller_expand_volume(controller_expand(&self.id, self.size, 0))?;
        Ok(())
    }

    /// Returns an error if the node has another size than the volume.
    pub(crate) fn expand(&self, client: &Client) -> Result<()> {
        let response = client.node_expand_volume(expand(&self.id, &self.target, self.size, 0))?;
        if response.capacity_bytes < self.size {
            return Err(format!(
                "volume {} has {} bytes on the node after its expansion to {}",
                self.id, response.capacity_bytes, self.size
            )
            .into());
        }
        Ok(())
    }
}
