//! The reader of all requests, and the requests of the Node service.

use std::path::{Path, PathBuf};

use csi_wire::csi as wire;
use loopfs::FilesystemUuid;
use loopfs::loop_device::Access;
use loopfs::mount::MountFlags;
use loopfs::publish::PublishMode;
use loopfs::volume_store::VolumeId;

use super::capability::{AccessType, Capability};
use super::field::{CapacityRange, Result, parse_volume_id, require_non_empty};
use super::path::TargetPath;
use crate::driver::DriverName;
use crate::driver::ThisNode;
use crate::error::{Error, InvalidRequest};

/// A request to stage a volume on this node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) volume: VolumeId,
    pub(crate) filesystem: Option<FilesystemUuid>,
    pub(crate) capability: Capability,
}

/// A request to unstage a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unstage {
    pub(crate) volume: VolumeId,
}

/// A request to publish a volume at a path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Publish {
    pub(crate) volume: VolumeId,
    pub(crate) filesystem: Option<FilesystemUuid>,
    pub(crate) target: TargetPath,
    pub(crate) mode: PublishMode,
    /// `true` if the volume may be published at one target only.
    pub(crate) single_target: bool,
}

/// A request to unpublish a volume from a path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unpublish {
    pub(crate) volume: VolumeId,
    pub(crate) target: TargetPath,
}

/// A request for the use, capacity and condition of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GetStats {
    pub(crate) volume: VolumeId,
    /// `None` if the path is not below the kubelet directory, so no volume can be published there.
    pub(crate) path: Option<TargetPath>,
}

/// A request to refresh the size of an expanded volume on this node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NodeExpand {
    pub(crate) volume: VolumeId,
    /// `None` if the path is not below the kubelet directory, so no volume can be published there.
    pub(crate) path: Option<TargetPath>,
    /// `true` if the path is the staging path, at which the driver keeps nothing.
    pub(crate) is_staging_path: bool,
    pub(crate) capacity: CapacityRange,
    pub(crate) access_type: Option<AccessType>,
}

/// Reads requests. It holds the configuration, which does not change until the process ends.
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
        let volume = parse_volume_id(&request.volume_id)?;
        // The driver keeps nothing at the staging path. An invalid path is an error all the same, because it indicates
        // a defect of the client.
        TargetPath::parse("staging_target_path", &request.staging_target_path, &self.kubelet_dir)?;
        let capability = Capability::parse(request.volume_capability)?;
        let filesystem = self.filesystem(&request.volume_context)?;
        Ok(Stage { volume, filesystem, capability })
    }

    pub(crate) fn unstage(&self, request: &wire::NodeUnstageVolumeRequest) -> Result<Unstage> {
        let volume = parse_volume_id(&request.volume_id)?;
        TargetPath::parse("staging_target_path", &request.staging_target_path, &self.kubelet_dir)?;
        Ok(Unstage { volume })
    }

    /// Reads a request to publish a volume. The error is [`Error::Precondition`] if the volume was not staged, as the specification
    /// requires of a driver with the capability STAGE_UNSTAGE_VOLUME.
    pub(crate) fn publish(&self, request: wire::NodePublishVolumeRequest) -> Result<Publish, Error> {
        let volume = parse_volume_id(&request.volume_id)?;
        let target = TargetPath::parse("target_path", &request.target_path, &self.kubelet_dir)?;
        let capability = Capability::parse(request.volume_capability)?;
        if request.staging_target_path.is_empty() {
            return Err(Error::Precondition(
                "staging_target_path: must not be empty; stage the volume first (NodeStageVolume), and name its staging path"
                    .to_owned(),
            ));
        }
        TargetPath::parse("staging_target_path", &request.staging_target_path, &self.kubelet_dir)?;
        let read_only = request.readonly || capability.read_only;
        let mode = match capability.access_type {
            AccessType::Block if read_only => PublishMode::Device(Access::ReadOnly),
            AccessType::Block => PublishMode::Device(Access::ReadWrite),
            AccessType::Mount(flags) => {
                PublishMode::Directory(MountFlags { read_only: flags.read_only || read_only, ..flags })
            }
        };
        let filesystem = self.filesystem(&request.volume_context)?;
        Ok(Publish { volume, filesystem, target, mode, single_target: capability.single_target })
    }

    pub(crate) fn unpublish(&self, request: &wire::NodeUnpublishVolumeRequest) -> Result<Unpublish> {
        let volume = parse_volume_id(&request.volume_id)?;
        let target = TargetPath::parse("target_path", &request.target_path, &self.kubelet_dir)?;
        Ok(Unpublish { volume, target })
    }

    pub(crate) fn stats(&self, request: &wire::NodeGetVolumeStatsRequest) -> Result<GetStats> {
        let volume = parse_volume_id(&request.volume_id)?;
        require_non_empty("volume_path", &request.volume_path)?;
        Ok(GetStats {
            volume,
            path: TargetPath::parse("volume_path", &request.volume_path, &self.kubelet_dir).ok(),
        })
    }

    pub(crate) fn node_expand(&self, request: wire::NodeExpandVolumeRequest) -> Result<NodeExpand> {
        let volume = parse_volume_id(&request.volume_id)?;
        require_non_empty("volume_path", &request.volume_path)?;
        let path = TargetPath::parse("volume_path", &request.volume_path, &self.kubelet_dir).ok();
        let is_staging_path = request.volume_path == request.staging_target_path;
        let capacity = CapacityRange::parse(request.capacity_range)?;
        let access_type =
            request.volume_capability.map(|capability| Capability::parse(Some(capability))).transpose()?;
        let access_type = access_type.map(|capability| capability.access_type);
        Ok(NodeExpand { volume, path, is_staging_path, capacity, access_type })
    }

    /// Reads the volume id of a request that has no other field.
    pub(crate) fn volume(&self, text: &str) -> Result<VolumeId> {
        parse_volume_id(text)
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
