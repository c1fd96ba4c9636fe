//! What a request asks of a volume: how it is accessed, and by how many.

use loopfs::{MountFlags, VolumeKind};

use super::field::Result;
use crate::error::InvalidRequest;
use crate::proto::csi::volume_capability::{self as wire, access_mode::Mode};

const FIELD: &str = "volume_capability";

/// The one file system volumes lie on.
const FILE_SYSTEM: &str = "xfs";

/// How a volume is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessType {
    /// As a directory, mounted with these flags.
    Mount(MountFlags),
    /// As a block device.
    Block,
}

impl AccessType {
    /// The kind of volume that is accessed so.
    pub(crate) fn kind(self) -> VolumeKind {
        match self {
            Self::Mount(_) => VolumeKind::Filesystem,
            Self::Block => VolumeKind::Block,
        }
    }
}

/// A capability this driver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) access_type: AccessType,
    /// The access mode asks for reading only.
    pub(crate) read_only: bool,
    /// The access mode allows one target path.
    pub(crate) single_target: bool,
}

impl Capability {
    pub(super) fn read(capability: Option<crate::proto::csi::VolumeCapability>) -> Result<Self> {
        let invalid = |problem: String| Err(InvalidRequest::new(FIELD, problem));
        let Some(capability) = capability else {
            return invalid("must be set".to_owned());
        };
        let access_type = match capability.access_type {
            None => return invalid("must have an access type, block or mount".to_owned()),
            Some(wire::AccessType::Block(wire::BlockVolume {})) => AccessType::Block,
            Some(wire::AccessType::Mount(mount)) => {
                let wire::MountVolume { fs_type, mount_flags, volume_mount_group } = mount;
                if !fs_type.is_empty() && fs_type != FILE_SYSTEM {
                    return invalid(format!(
                        "fs_type {fs_type:?}: volumes are directories of the node's {FILE_SYSTEM} file system; \
                         leave fs_type empty, or ask for a block volume and format it in the workload"
                    ));
                }
                if !volume_mount_group.is_empty() {
                    return invalid(
                        "volume_mount_group is not supported; the orchestrator sets the group".to_owned(),
                    );
                }
                let flags = MountFlags::from_options(&mount_flags)
                    .map_err(|error| InvalidRequest::new("mount_flags", error.to_string()))?;
                AccessType::Mount(flags)
            }
        };
        let mode = capability.access_mode.map_or(0, |access_mode| access_mode.mode);
        let (read_only, single_target) = match Mode::try_from(mode) {
            Ok(Mode::SingleNodeWriter | Mode::SingleNodeMultiWriter) => (false, false),
            Ok(Mode::SingleNodeSingleWriter) => (false, true),
            Ok(Mode::SingleNodeReaderOnly) => (true, false),
            Ok(Mode::Unknown) => return invalid("must have an access mode".to_owned()),
            Ok(
                mode @ (Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter),
            ) => {
                return invalid(format!(
                    "access mode {}: a volume lives on one node; ask for a SINGLE_NODE mode",
                    mode.as_str_name()
                ));
            }
            Err(_unknown) => return invalid(format!("access mode {mode} is not known to this driver")),
        };
        Ok(Self { access_type, read_only, single_target })
    }
}
