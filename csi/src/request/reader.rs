//! Requests of the Node service, and the reader of all requests.

use std::path::{Path, PathBuf};

use loopfs::{Access, FilesystemUuid, MountFlags, VolumeId};

use super::capability::{AccessType, Capability};
use super::field::{CapacityRange, Result, required, volume_id};
use super::path::TargetPath;
use crate::driver::DriverName;
use crate::error::InvalidRequest;
use crate::proto::csi as wire;
use crate::topology::ThisNode;

/// Make a volume ready on this node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) volume: VolumeId,
    pub(crate) filesystem: Option<FilesystemUuid>,
    pub(crate) capability: Capability,
}

/// Undo [`Stage`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unstage {
    pub(crate) volume: VolumeId,
}

/// Show a volume at a path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Publish {
    pub(crate) volume: VolumeId,
    pub(crate) filesystem: Option<FilesystemUuid>,
    pub(crate) target: TargetPath,
    pub(crate) mode: PublishMode,
    /// At most one target at a time.
    pub(crate) single_target: bool,
}

/// How a volume is shown at its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PublishMode {
    /// As a directory.
    Mount(MountFlags),
    /// As a block device node.
    Block(Access),
}

/// Undo [`Publish`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unpublish {
    pub(crate) volume: VolumeId,
    pub(crate) target: TargetPath,
}

/// How full a volume is, and how it fares.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) volume: VolumeId,
    /// None: a path at which nothing can be published, so nothing is.
    pub(crate) path: Option<TargetPath>,
}

/// Give a volume its new size on this node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NodeExpand {
    pub(crate) volume: VolumeId,
    pub(crate) capacity: CapacityRange,
    pub(crate) access_type: Option<AccessType>,
}

/// Reads requests, given what is fixed for the life of the process.
#[derive(Clone, Debug)]
pub(crate) struct RequestReader {
    filesystem_uuid_key: String,
    pub(super) node: ThisNode,
    kubelet_dir: PathBuf,
}

impl RequestReader {
    pub(crate) fn new(driver_name: &DriverName, node: ThisNode, kubelet_dir: &Path) -> Self {
        let filesystem_uuid_key = driver_name.filesystem_uuid_key();
        Self { filesystem_uuid_key, node, kubelet_dir: kubelet_dir.to_owned() }
    }

    pub(crate) fn stage(&self, request: wire::NodeStageVolumeRequest) -> Result<Stage> {
        let volume = volume_id(&request.volume_id)?;
        // Nothing is kept there, but a path that is not one shows a caller that is confused.
        TargetPath::read("staging_target_path", &request.staging_target_path, &self.kubelet_dir)?;
        let capability = Capability::read(request.volume_capability)?;
        let filesystem = self.filesystem(&request.volume_context)?;
        Ok(Stage { volume, filesystem, capability })
    }

    pub(crate) fn unstage(&self, request: &wire::NodeUnstageVolumeRequest) -> Result<Unstage> {
        let volume = volume_id(&request.volume_id)?;
        TargetPath::read("staging_target_path", &request.staging_target_path, &self.kubelet_dir)?;
        Ok(Unstage { volume })
    }

    pub(crate) fn publish(&self, request: wire::NodePublishVolumeRequest) -> Result<Publish> {
        let volume = volume_id(&request.volume_id)?;
        let target = TargetPath::read("target_path", &request.target_path, &self.kubelet_dir)?;
        let capability = Capability::read(request.volume_capability)?;
        let read_only = request.readonly || capability.read_only;
        let mode = match capability.access_type {
            AccessType::Block if read_only => PublishMode::Block(Access::ReadOnly),
            AccessType::Block => PublishMode::Block(Access::ReadWrite),
            AccessType::Mount(flags) => {
                PublishMode::Mount(MountFlags { read_only: flags.read_only || read_only, ..flags })
            }
        };
        let filesystem = self.filesystem(&request.volume_context)?;
        Ok(Publish { volume, filesystem, target, mode, single_target: capability.single_target })
    }

    pub(crate) fn unpublish(&self, request: &wire::NodeUnpublishVolumeRequest) -> Result<Unpublish> {
        let volume = volume_id(&request.volume_id)?;
        let target = TargetPath::read("target_path", &request.target_path, &self.kubelet_dir)?;
        Ok(Unpublish { volume, target })
    }

    pub(crate) fn stats(&self, request: &wire::NodeGetVolumeStatsRequest) -> Result<Stats> {
        let volume = volume_id(&request.volume_id)?;
        required("volume_path", &request.volume_path)?;
        Ok(Stats {
            volume,
            path: TargetPath::read("volume_path", &request.volume_path, &self.kubelet_dir).ok(),
        })
    }

    pub(crate) fn node_expand(&self, request: wire::NodeExpandVolumeRequest) -> Result<NodeExpand> {
        let volume = volume_id(&request.volume_id)?;
        required("volume_path", &request.volume_path)?;
        let capacity = CapacityRange::read(request.capacity_range)?;
        let access_type =
            request.volume_capability.map(|capability| Capability::read(Some(capability))).transpose()?;
        Ok(NodeExpand { volume, capacity, access_type: access_type.map(|capability| capability.access_type) })
    }

    /// For requests that say nothing else.
    pub(crate) fn volume(&self, text: &str) -> Result<VolumeId> {
        volume_id(text)
    }

    pub(super) fn filesystem(
        &self,
        context: &std::collections::HashMap<String, String>,
    ) -> Result<Option<FilesystemUuid>> {
        context
            .get(&self.filesystem_uuid_key)
            .map(|uuid| {
                uuid.parse().map_err(|error: loopfs::Error| {
                    InvalidRequest::new("volume_context", format!("{}: {error}", self.filesystem_uuid_key))
                })
            })
            .transpose()
    }
}
