//! The fields of requests, validated. The services parse their messages with these pure functions, which are the only place where an
//! optional field is checked.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use csi_wire::csi as wire;
use csi_wire::csi::volume_capability;
use csi_wire::csi::volume_capability::access_mode::Mode;
use loopfs::mount::MountFlags;
use loopfs::volume_store::{VolumeId, VolumeKind};
use loopfs::{Bytes, FilesystemUuid};
use sha2::{Digest, Sha256};

use crate::driver::{DriverName, ThisNode};
use crate::error::{Error, InvalidRequest};
use crate::locks::OperationObject;

/// The maximum length of a name in bytes, according to the specification.
const MAX_NAME_LEN: usize = 128;

/// The prefix of an id that is derived from a name which is not a valid id.
const DERIVED: &str = "name-";

/// `PATH_MAX`, less the terminating NUL.
const MAX_PATH_LEN: usize = 4095;

/// `NAME_MAX`.
const MAX_COMPONENT_LEN: usize = 255;

/// The file system of all volumes.
const FILE_SYSTEM: &str = "xfs";

/// The prefix of a page token.
const AFTER: &str = "after:";

type Result<T, E = InvalidRequest> = std::result::Result<T, E>;

/// The configuration that decides which requests are valid. It does not change until the process ends.
#[derive(Clone, Debug)]
pub(crate) struct RequestReader {
    pub(crate) node: ThisNode,
    pub(crate) filesystem_uuid_key: String,
    kubelet_dir: PathBuf,
}

impl RequestReader {
    pub(crate) fn new(driver_name: &DriverName, node: ThisNode, kubelet_dir: &Path) -> Self {
        let filesystem_uuid_key = driver_name.filesystem_uuid_key();
        Self { node, filesystem_uuid_key, kubelet_dir: kubelet_dir.to_owned() }
    }

    /// Parses a path below the kubelet directory.
    pub(crate) fn path(&self, field: &'static str, text: &str) -> Result<TargetPath> {
        let invalid = |problem: String| Err(InvalidRequest::new(field, problem));
        require_non_empty(field, text)?;
        if text.len() > MAX_PATH_LEN {
            return invalid(format!("must not be longer than {MAX_PATH_LEN} bytes, but has {}", text.len()));
        }
        if let Some(character) = text.chars().find(|character| character.is_control()) {
            return invalid(format!("must not contain {character:?}"));
        }
        let path = Path::new(text);
        if !path.is_absolute() {
            return invalid("must be an absolute path".to_owned());
        }
        if path.components().any(|component| component == Component::ParentDir) {
            return invalid("must not contain ..".to_owned());
        }
        let relative = match path.strip_prefix(&self.kubelet_dir) {
            Ok(relative) if relative.file_name().is_some() => relative,
            _ => {
                return invalid(format!(
                    "must be below {0} (--kubelet-dir); if {text} is below the --root-dir of the kubelet, give that to the driver \
                     instead of {0}",
                    self.kubelet_dir.display()
                ));
            }
        };
        if relative.components().any(|component| component.as_os_str().len() > MAX_COMPONENT_LEN) {
            return invalid(format!(
                "must not have a component that is longer than {MAX_COMPONENT_LEN} bytes"
            ));
        }
        // The path is rebuilt from its components, without the `//` and `/./` that components() skips.
        let relative: PathBuf = relative.components().collect();
        Ok(TargetPath { full: self.kubelet_dir.join(&relative), relative })
    }

    /// Returns the file system on which a volume was created, according to its context.
    pub(crate) fn filesystem(&self, context: &HashMap<String, String>) -> Result<Option<FilesystemUuid>> {
        let parse = |uuid: &String| {
            uuid.parse().map_err(|error: loopfs::Error| {
                InvalidRequest::new("volume_context", format!("{}: {error}", self.filesystem_uuid_key))
            })
        };
        context.get(&self.filesystem_uuid_key).map(parse).transpose()
    }

    /// Returns `true` if this node satisfies the requirements.
    pub(crate) fn is_accessible(&self, requirements: Option<wire::TopologyRequirement>) -> bool {
        let requisite = requirements.unwrap_or_default().requisite;
        requisite.is_empty() || requisite.iter().any(|topology| self.node.lies_in(topology))
    }
}

/// A path below the kubelet directory, relative to that directory. Only its text is checked: it contains neither `..`
/// nor anything else that leads outside. [`loopfs::publish`] refuses symbolic links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TargetPath {
    full: PathBuf,
    relative: PathBuf,
}

impl TargetPath {
    /// Returns the path relative to the kubelet directory.
    pub(crate) fn relative(&self) -> &Path {
        &self.relative
    }
}

impl fmt::Display for TargetPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.full.display().fmt(f)
    }
}

impl From<&TargetPath> for OperationObject {
    fn from(path: &TargetPath) -> Self {
        Self::Target(path.relative.clone())
    }
}

/// Returns an error if a field is empty that the specification marks as REQUIRED.
pub(crate) fn require_non_empty(field: &'static str, text: &str) -> Result<()> {
    if text.is_empty() { Err(InvalidRequest::new(field, "must not be empty")) } else { Ok(()) }
}

/// Parses the field `volume_id`. Returns an error if no volume of this driver can have the id.
pub(crate) fn volume_id(text: &str) -> Result<VolumeId> {
    const FIELD: &str = "volume_id";
    require_non_empty(FIELD, text)?;
    VolumeId::parse(text).map_err(|error| InvalidRequest::new(FIELD, error.to_string()))
}

/// Parses the id of a volume or snapshot that must exist. The error for an id that none can have is NOT_FOUND, as for every source or
/// snapshot that does not exist, because the specification itself allows the id.
///
/// `kind` is "volume" or "snapshot".
pub(crate) fn existing_id<Id: FromStr>(field: &'static str, kind: &str, text: &str) -> Result<Id, Error> {
    /// The error repeats no more of an id than this, because a client may send one of any length.
    const MAX_REPEATED_CHARS: usize = 128;
    require_non_empty(field, text)?;
    text.parse().map_err(|_invalid| {
        let id: String = text.chars().take(MAX_REPEATED_CHARS).collect();
        Error::SourceNotFound(format!("{field}: {kind} {id:?} does not exist"))
    })
}

/// Parses the id of a volume or snapshot to delete. Returns `None` if none can have this id, so that it counts as deleted.
pub(crate) fn deleted_id<Id: FromStr>(field: &'static str, text: &str) -> Result<Option<Id>> {
    require_non_empty(field, text)?;
    Ok(text.parse().ok())
}

/// Returns the id of the volume or snapshot with a name, which the orchestrator suggests. The same name has the same id in every
/// process, and two names never share one. The id is the name itself, or the hash of a name that is not a valid id or looks like such
/// a hash.
pub(crate) fn id_of_name<Id: FromStr<Err = loopfs::Error>>(name: &str) -> Result<Id> {
    const FIELD: &str = "name";
    let invalid = |problem: String| Err(InvalidRequest::new(FIELD, problem));
    require_non_empty(FIELD, name)?;
    if name.len() > MAX_NAME_LEN {
        return invalid(format!("must not be longer than {MAX_NAME_LEN} bytes, but has {}", name.len()));
    }
    // The specification allows the common white space.
    let is_forbidden = |character: &char| character.is_control() && !matches!(character, '\t' | '\n' | '\r');
    if let Some(character) = name.chars().find(is_forbidden) {
        return invalid(format!("must not contain {character:?}"));
    }
    match name.parse() {
        Ok(id) if !is_derived(name) => Ok(id),
        _ => derived(name)
            .parse()
            .map_err(|error: loopfs::Error| InvalidRequest::new(FIELD, error.to_string())),
    }
}

fn derived(name: &str) -> String {
    let mut id = DERIVED.to_owned();
    for byte in Sha256::digest(name) {
        // Writing to a string cannot fail.
        write!(id, "{byte:02x}").ok();
    }
    id
}

fn is_derived(name: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix(DERIVED).is_some_and(|rest| rest.len() == 64 && rest.bytes().all(digit))
}

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
    pub(crate) fn parse(capability: Option<wire::VolumeCapability>) -> Result<Self> {
        let invalid = |problem: String| Err(InvalidRequest::new("volume_capability", problem));
        let Some(capability) = capability else {
            return invalid("must be set".to_owned());
        };
        let access_type = match capability.access_type {
            None => return invalid("must have an access type, block or mount".to_owned()),
            Some(volume_capability::AccessType::Block(volume_capability::BlockVolume {})) => {
                AccessType::Block
            }
            Some(volume_capability::AccessType::Mount(mount)) => {
                let volume_capability::MountVolume { fs_type, mount_flags, volume_mount_group } = mount;
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

/// Returns the kind of volume that has a capability, if the request has one.
pub(crate) fn kind_of(capability: Option<wire::VolumeCapability>) -> Result<Option<VolumeKind>> {
    let kind = |capability| Ok(Capability::parse(Some(capability))?.access_type.kind());
    capability.map(kind).transpose()
}

/// The sizes that a request accepts. A bound is `None` if the request does not set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CapacityRange {
    /// The smallest accepted size: `required_bytes`.
    pub(crate) required: Option<Bytes>,
    /// The largest accepted size: `limit_bytes`.
    pub(crate) limit: Option<Bytes>,
}

impl CapacityRange {
    /// Returns an error if a bound is negative, or if the limit is smaller than the required size.
    pub(crate) fn parse(range: Option<wire::CapacityRange>) -> Result<Self> {
        let invalid = |problem: String| InvalidRequest::new("capacity_range", problem);
        // Zero means that the request does not set the bound.
        let bound = |name: &str, bytes: i64| match u64::try_from(bytes) {
            Ok(0) => Ok(None),
            Ok(bytes) => Ok(Some(Bytes(bytes))),
            Err(_negative) => Err(invalid(format!("{name} must not be negative, but is {bytes}"))),
        };
        let wire::CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
        let required = bound("required_bytes", required_bytes)?;
        let limit = bound("limit_bytes", limit_bytes)?;
        match (required, limit) {
            (Some(required), Some(limit)) if required > limit => {
                Err(invalid(format!("required_bytes is {required}, but limit_bytes is only {limit}")))
            }
            _ => Ok(Self { required, limit }),
        }
    }
}

/// The requested part of a list of volumes or snapshots.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListRequest<Id> {
    pub(crate) from: Option<PageToken<Id>>,
    pub(crate) max_entries: Option<usize>,
}

impl<Id: FromStr> ListRequest<Id> {
    pub(crate) fn parse(max_entries: i32, starting_token: &str) -> Result<Self, Error> {
        let max_entries = match usize::try_from(max_entries) {
            Ok(0) => None,
            Ok(max_entries) => Some(max_entries),
            Err(_negative) => {
                let problem = format!("must not be negative, but is {max_entries}");
                return Err(InvalidRequest::new("max_entries", problem).into());
            }
        };
        let from = match starting_token {
            "" => None,
            token => Some(PageToken::parse(token).ok_or_else(|| {
                let text =
                    "starting_token: this driver did not return such a token; start with an empty token";
                Error::StaleToken(text.to_owned())
            })?),
        };
        Ok(Self { from, max_entries })
    }
}

/// The token of a list page: the last entry of the previous page. It is an id and not a position, so that created and deleted
/// entries do not shift the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PageToken<Id>(pub(crate) Id);

impl<Id: FromStr> PageToken<Id> {
    /// Returns `None` for a text that this driver did not return.
    fn parse(text: &str) -> Option<Self> {
        text.strip_prefix(AFTER)?.parse().ok().map(Self)
    }
}

impl<Id: fmt::Display> fmt::Display for PageToken<Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(last) = self;
        write!(f, "{AFTER}{last}")
    }
}

#[cfg(test)]
pub(crate) mod tests;
