//! Requests of the Controller service.

use std::collections::HashMap;
use std::str::FromStr;

use csi_wire::csi as wire;
use csi_wire::csi::volume_content_source::{self as source, Type};
use csi_wire::{Settings, reserved};
use loopfs::FilesystemUuid;
use loopfs::volume_store::{Annotations, OwnedContentSource, SnapshotId, VolumeId, VolumeKind};

use super::capability::Capability;
use super::field::{CapacityRange, Result, not_found, parse_volume_id, require_non_empty};
use super::name;
use super::page_token::PageToken;
use super::reader::RequestReader;
use crate::error::{Error, InvalidRequest};

const CAPABILITIES: &str = "volume_capabilities";

/// A request to create a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Create {
    pub(crate) volume: VolumeId,
    pub(crate) kind: VolumeKind,
    pub(crate) capacity: CapacityRange,
    pub(crate) parameters: Settings,
    pub(crate) annotations: Annotations,
    /// The source of the volume's initial content.
    pub(crate) source: Option<OwnedContentSource>,
    /// `true` if a volume on this node satisfies the request.
    pub(crate) accessible_here: bool,
}

/// A request to validate the properties of a volume.
#[derive(Debug)]
pub(crate) struct Validate {
    pub(crate) volume: VolumeId,
    /// The expected properties, or the reason why no volume can have them.
    pub(crate) expected: Result<ExpectedProperties>,
}

/// The properties that a client expects of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpectedProperties {
    pub(crate) kind: VolumeKind,
    pub(crate) filesystem: Option<FilesystemUuid>,
    /// `None` if the request contains no parameters.
    pub(crate) parameters: Option<Settings>,
}

/// A request to list volumes or snapshots.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListRequest<Id> {
    pub(crate) from: Option<PageToken<Id>>,
    pub(crate) max_entries: Option<usize>,
}

/// A request for the free capacity.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CapacityQuery {
    /// `true` if the request is about this node.
    pub(crate) here: bool,
    /// The kind of the volume. `None` if the request names no capability.
    pub(crate) kind: Option<VolumeKind>,
    pub(crate) parameters: Settings,
}

/// A request to expand a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ControllerExpand {
    pub(crate) volume: VolumeId,
    pub(crate) capacity: CapacityRange,
    pub(crate) kind: Option<VolumeKind>,
}

impl RequestReader {
    pub(crate) fn create(&self, request: wire::CreateVolumeRequest) -> Result<Create, Error> {
        let volume = name::volume_id(&request.name)?;
        let kind = kind_of_all(request.volume_capabilities)?;
        let capacity = CapacityRange::parse(request.capacity_range)?;
        let parameters = settings(&request.parameters)?;
        let claim = reserved::claim_of(&request.parameters).map(|claim| (reserved::CLAIM_ANNOTATION, claim));
        let annotations =
            Annotations::new(claim).map_err(|error| InvalidRequest::new("parameters", error.to_string()))?;
        refuse_mutable(&request.mutable_parameters)?;
        let source = request.volume_content_source.map(content_source).transpose()?;
        let accessible_here = self.is_accessible(request.accessibility_requirements);
        Ok(Create { volume, kind, capacity, parameters, annotations, source, accessible_here })
    }

    /// Returns `true` if this node satisfies the requirements.
    pub(super) fn is_accessible(&self, requirements: Option<wire::TopologyRequirement>) -> bool {
        let requisite = requirements.unwrap_or_default().requisite;
        requisite.is_empty() || requisite.iter().any(|topology| self.node.lies_in(topology))
    }

    /// Returns the volume to delete. Returns `None` if no volume can have this id, so that it counts as deleted.
    pub(crate) fn delete(&self, request: &wire::DeleteVolumeRequest) -> Result<Option<VolumeId>> {
        require_non_empty("volume_id", &request.volume_id)?;
        Ok(VolumeId::parse(&request.volume_id).ok())
    }

    pub(crate) fn validate(&self, request: wire::ValidateVolumeCapabilitiesRequest) -> Result<Validate> {
        let volume = parse_volume_id(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(no_capabilities());
        }
        let expected = || {
            refuse_mutable(&request.mutable_parameters)?;
            Ok(ExpectedProperties {
                kind: kind_of_all(request.volume_capabilities)?,
                filesystem: self.filesystem(&request.volume_context)?,
                parameters: (!request.parameters.is_empty())
                    .then(|| settings(&request.parameters))
                    .transpose()?,
            })
        };
        Ok(Validate { volume, expected: expected() })
    }

    pub(crate) fn list<Id: FromStr>(
        &self,
        max_entries: i32,
        starting_token: &str,
    ) -> Result<ListRequest<Id>, Error> {
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
        Ok(ListRequest { from, max_entries })
    }

    pub(crate) fn capacity(&self, request: wire::GetCapacityRequest) -> Result<CapacityQuery> {
        let kind = match request.volume_capabilities {
            capabilities if capabilities.is_empty() => None,
            capabilities => Some(kind_of_all(capabilities)?),
        };
        let parameters = settings(&request.parameters)?;
        let here = request.accessible_topology.is_none_or(|topology| self.node.lies_in(&topology));
        Ok(CapacityQuery { here, kind, parameters })
    }

    pub(crate) fn controller_expand(
        &self,
        request: wire::ControllerExpandVolumeRequest,
    ) -> Result<ControllerExpand> {
        let volume = parse_volume_id(&request.volume_id)?;
        let capacity = CapacityRange::parse(request.capacity_range)?;
        if capacity == CapacityRange::default() {
            return Err(InvalidRequest::new(
                "capacity_range",
                "must contain required_bytes, limit_bytes or both",
            ));
        }
        let capability =
            request.volume_capability.map(|capability| Capability::parse(Some(capability))).transpose()?;
        Ok(ControllerExpand {
            volume,
            capacity,
            kind: capability.map(|capability| capability.access_type.kind()),
        })
    }
}

fn content_source(source: wire::VolumeContentSource) -> Result<OwnedContentSource, Error> {
    const FIELD: &str = "volume_content_source";
    let (kind, id, parse): (_, _, fn(&str) -> loopfs::Result<OwnedContentSource>) = match source.r#type {
        Some(Type::Volume(source::VolumeSource { volume_id })) => {
            ("volume", volume_id, |id| VolumeId::parse(id).map(OwnedContentSource::Volume))
        }
        Some(Type::Snapshot(source::SnapshotSource { snapshot_id })) => {
            ("snapshot", snapshot_id, |id| SnapshotId::parse(id).map(OwnedContentSource::Snapshot))
        }
        None => return Err(InvalidRequest::new(FIELD, "must name a volume or a snapshot").into()),
    };
    require_non_empty(FIELD, &id)?;
    parse(&id).map_err(|_invalid| not_found(FIELD, kind, &id))
}

/// Returns the one kind of volume that has all these capabilities.
fn kind_of_all(capabilities: Vec<wire::VolumeCapability>) -> Result<VolumeKind> {
    let kinds = capabilities
        .into_iter()
        .map(|capability| Ok(Capability::parse(Some(capability))?.access_type.kind()))
        .collect::<Result<Vec<_>>>()?;
    match kinds.as_slice() {
        [] => Err(no_capabilities()),
        [kind, others @ ..] if others.iter().all(|other| other == kind) => Ok(*kind),
        _ => Err(InvalidRequest::new(
            CAPABILITIES,
            "block and mount access are both requested, but a volume is either a device or a directory",
        )),
    }
}

fn no_capabilities() -> InvalidRequest {
    InvalidRequest::new(CAPABILITIES, "must not be empty")
}

fn settings(parameters: &HashMap<String, String>) -> Result<Settings> {
    Settings::parse(parameters, reserved::of_volume, &[])
        .map_err(|error| InvalidRequest::new("parameters", error.to_string()))
}

fn refuse_mutable(parameters: &HashMap<String, String>) -> Result<()> {
    if parameters.is_empty() {
        return Ok(());
    }
    Err(InvalidRequest::new(
        "mutable_parameters",
        "the parameters of a volume are fixed at its creation; use parameters",
    ))
}

#[cfg(test)]
mod tests;
