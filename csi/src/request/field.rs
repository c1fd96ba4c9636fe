//! Fields that several requests have.

use loopfs::Bytes;
use loopfs::volume_store::VolumeId;

use crate::error::{Error, InvalidRequest};
use crate::proto::csi as wire;

pub(super) type Result<T, E = InvalidRequest> = std::result::Result<T, E>;

/// The sizes that a request accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CapacityRange {
    pub(crate) at_least: Option<Bytes>,
    pub(crate) at_most: Option<Bytes>,
}

impl CapacityRange {
    pub(super) fn read(range: Option<wire::CapacityRange>) -> Result<Self> {
        const FIELD: &str = "capacity_range";
        let wire::CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
        let bytes = |value: i64, name: &str| match u64::try_from(value) {
            Ok(0) => Ok(None),
            Ok(value) => Ok(Some(Bytes(value))),
            Err(_negative) => {
                Err(InvalidRequest::new(FIELD, format!("{name} must not be negative, but is {value}")))
            }
        };
        let range = Self {
            at_least: bytes(required_bytes, "required_bytes")?,
            at_most: bytes(limit_bytes, "limit_bytes")?,
        };
        match (range.at_least, range.at_most) {
            (Some(at_least), Some(at_most)) if at_least > at_most => Err(InvalidRequest::new(
                FIELD,
                format!("required_bytes is {at_least}, which is above limit_bytes {at_most}"),
            )),
            _ => Ok(range),
        }
    }
}

pub(super) fn volume_id(text: &str) -> Result<VolumeId> {
    if text.is_empty() {
        return Err(InvalidRequest::new("volume_id", "must not be empty"));
    }
    VolumeId::parse(text).map_err(|error| InvalidRequest::new("volume_id", error.to_string()))
}

pub(super) fn required(field: &'static str, text: &str) -> Result<()> {
    if text.is_empty() { Err(InvalidRequest::new(field, "must not be empty")) } else { Ok(()) }
}

/// Returns the error for an id that no volume or snapshot can have.
pub(super) fn source_not_found(field: &str, what: &str, id: &str) -> Error {
    Error::SourceNotFound(format!(
        "{field}: {what} {:?} does not exist",
        id.chars().take(128).collect::<String>()
    ))
}
