//! Volume capabilities: access type and access mode.

use csi_wire::csi::volume_capability::{self as wire, access_mode::Mode};
use loopfs::mount::MountFlags;
use loopfs::volume_store::VolumeKind;

use super::field::Result;
use crate::error::InvalidRequest;

const FIELD: &str = "volume_capability";

/// The file system of all volumes.
const FILE_SYSTEM: &str = "xfs";

/// The access type of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessType {
    /// A directory, mounted with these flags.
    Mount(MountFlags),
    /// A block device.
    Block,
}

impl AccessType {
    /// Returns the kind of volume that has this access type.
    pub(crate) fn kind(self) -> VolumeKind {
        match self {
            Self::Mount(_) => VolumeKind::Filesystem,
            Self::Block => VolumeKind::Block,
        }
    }
}

/// A capability that this driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) access_type: AccessType,
    /// `true` if the access mode is read-only.
    pub(crate) read_only: bool,
    /// `true` if the access mode permits only one target path.
    pub(crate) single_target: bool,
}

impl Capability {
    pub(super) fn parse(capability: Option<csi_wire::csi::VolumeCapability>) -> Result<Self> {
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
                         leave fs_type empty, or request a block volume and format it in the workload"
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
                    "access mode {}: a volume is local to one node; request a SINGLE_NODE mode",
                    mode.as_str_name()
                ));
            }
            Err(_unknown) => return invalid(format!("access mode {mode} is not known to this driver")),
        };
        Ok(Self { access_type, read_only, single_target })
    }
}
