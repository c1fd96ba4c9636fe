//! Parses the fields that several requests have in common.

use csi_wire::csi as wire;
use loopfs::Bytes;
use loopfs::volume_store::VolumeId;

use crate::error::{Error, InvalidRequest};

pub(super) type Result<T, E = InvalidRequest> = std::result::Result<T, E>;

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
    pub(super) fn parse(range: Option<wire::CapacityRange>) -> Result<Self> {
        let wire::CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
        let range = Self {
            required: bound("required_bytes", required_bytes)?,
            limit: bound("limit_bytes", limit_bytes)?,
        };
        match (range.required, range.limit) {
            (Some(required), Some(limit)) if required > limit => {
                Err(invalid_range(format!("required_bytes is {required}, but limit_bytes is only {limit}")))
            }
            _ => Ok(range),
        }
    }
}

/// Converts a bound of a capacity range. Zero means that the request does not set it.
fn bound(name: &str, bytes: i64) -> Result<Option<Bytes>> {
    match u64::try_from(bytes) {
        Ok(0) => Ok(None),
        Ok(bytes) => Ok(Some(Bytes(bytes))),
        Err(_negative) => Err(invalid_range(format!("{name} must not be negative, but is {bytes}"))),
    }
}

fn invalid_range(problem: String) -> InvalidRequest {
    InvalidRequest::new("capacity_range", problem)
}

/// Parses the field `volume_id`. Returns an error if no volume of this driver can have the id.
pub(super) fn parse_volume_id(text: &str) -> Result<VolumeId> {
    const FIELD: &str = "volume_id";
    require_non_empty(FIELD, text)?;
    VolumeId::parse(text).map_err(|error| InvalidRequest::new(FIELD, error.to_string()))
}

/// Returns an error if a field is empty that the specification marks as REQUIRED.
pub(super) fn require_non_empty(field: &'static str, text: &str) -> Result<()> {
    if text.is_empty() { Err(InvalidRequest::new(field, "must not be empty")) } else { Ok(()) }
}

/// Returns the error for an id that no volume or snapshot of this driver can have. The code is NOT_FOUND, as for every
/// source or snapshot that does not exist, because the specification itself allows the id.
///
/// `kind` is "volume" or "snapshot".
pub(super) fn not_found(field: &str, kind: &str, id: &str) -> Error {
    /// The error repeats no more of an id than this, because a client may send one of any length.
    const MAX_REPEATED_CHARS: usize = 128;
    let id: String = id.chars().take(MAX_REPEATED_CHARS).collect();
    Error::SourceNotFound(format!("{field}: {kind} {id:?} does not exist"))
}
