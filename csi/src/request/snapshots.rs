//! Requests about snapshots.

use csi_wire::csi as wire;
use csi_wire::reserved;
use loopfs::volume_store::{SnapshotId, VolumeId};

use super::controller::ListRequest;
use super::field::{Result, not_found, require_non_empty};
use super::name;
use super::reader::RequestReader;
use crate::error::{Error, InvalidRequest};

/// A request to create a snapshot of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CreateSnapshot {
    pub(crate) snapshot: SnapshotId,
    pub(crate) source: VolumeId,
    /// `true` if a snapshot on this node satisfies the request.
    pub(crate) accessible_here: bool,
}

/// A request to list snapshots.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListSnapshots {
    pub(crate) list: ListRequest<SnapshotId>,
    /// `None` if no snapshot can match the request.
    pub(crate) filter: Option<Filter>,
}

/// A filter for snapshots. All conditions must hold.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) snapshot: Option<SnapshotId>,
    pub(crate) source: Option<VolumeId>,
}

impl RequestReader {
    pub(crate) fn create_snapshot(
        &self,
        request: wire::CreateSnapshotRequest,
    ) -> Result<CreateSnapshot, Error> {
        const SOURCE: &str = "source_volume_id";
        let snapshot = name::snapshot_id(&request.name)?;
        require_non_empty(SOURCE, &request.source_volume_id)?;
        let unknown = request.parameters.keys().filter(|name| !reserved::is_of_snapshot(name));
        if let Some(name) = unknown.min() {
            let problem = format!("unknown parameter {name:?}; snapshots have no parameters");
            return Err(InvalidRequest::new("parameters", problem).into());
        }
        let source = VolumeId::parse(&request.source_volume_id)
            .map_err(|_invalid| not_found(SOURCE, "volume", &request.source_volume_id))?;
        let accessible_here = self.is_accessible(request.accessibility_requirements);
        Ok(CreateSnapshot { snapshot, source, accessible_here })
    }

    /// Returns the snapshot to delete. Returns `None` if no snapshot can have this id, so that it counts as deleted.
    pub(crate) fn delete_snapshot(
        &self,
        request: &wire::DeleteSnapshotRequest,
    ) -> Result<Option<SnapshotId>> {
        require_non_empty("snapshot_id", &request.snapshot_id)?;
        Ok(SnapshotId::parse(&request.snapshot_id).ok())
    }

    pub(crate) fn get_snapshot(&self, request: &wire::GetSnapshotRequest) -> Result<SnapshotId, Error> {
        const FIELD: &str = "snapshot_id";
        require_non_empty(FIELD, &request.snapshot_id)?;
        SnapshotId::parse(&request.snapshot_id)
            .map_err(|_invalid| not_found(FIELD, "snapshot", &request.snapshot_id))
    }

    pub(crate) fn list_snapshots(
        &self,
        request: &wire::ListSnapshotsRequest,
    ) -> Result<ListSnapshots, Error> {
        let list = self.list(request.max_entries, &request.starting_token)?;
        Ok(ListSnapshots { list, filter: filter(&request.snapshot_id, &request.source_volume_id) })
    }
}

/// Returns `None` if no snapshot or volume can have one of the ids.
fn filter(snapshot: &str, source: &str) -> Option<Filter> {
    let snapshot = (!snapshot.is_empty()).then(|| SnapshotId::parse(snapshot)).transpose().ok()?;
    let source = (!source.is_empty()).then(|| VolumeId::parse(source)).transpose().ok()?;
    Some(Filter { snapshot, source })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tonic::Code;

    use super::super::tests::reader;
    use super::*;

    fn create() -> wire::CreateSnapshotRequest {
        wire::CreateSnapshotRequest {
            name: "snapshot-1".to_owned(),
            source_volume_id: "pvc-1".to_owned(),
            ..wire::CreateSnapshotRequest::default()
        }
    }

    fn on(node: &str) -> Option<wire::TopologyRequirement> {
        let segments = [("topology.csi.loopfs.dev/node".to_owned(), node.to_owned())].into();
        Some(wire::TopologyRequirement {
            requisite: vec![wire::Topology { segments }],
            preferred: Vec::new(),
        })
    }

    #[rstest]
    #[case::anywhere(None, true)]
    #[case::here(on("node-1"), true)]
    #[case::elsewhere(on("node-2"), false)]
    fn a_create_snapshot_request_is_converted(
        #[case] requirements: Option<wire::TopologyRequirement>,
        #[case] accessible_here: bool,
    ) {
        // csi-snapshotter adds these with --extra-create-metadata.
        let parameters = ["volumesnapshot/name", "volumesnapshot/namespace", "volumesnapshotcontent/name"]
            .map(|name| (format!("csi.storage.k8s.io/{name}"), "s".to_owned()))
            .into();
        let request =
            wire::CreateSnapshotRequest { accessibility_requirements: requirements, parameters, ..create() };
        let expected = CreateSnapshot {
            snapshot: SnapshotId::parse("snapshot-1").unwrap(),
            source: VolumeId::parse("pvc-1").unwrap(),
            accessible_here,
        };
        assert_eq!(reader().create_snapshot(request).unwrap(), expected);
    }

    #[rstest]
    #[case::no_name(|request: &mut wire::CreateSnapshotRequest| request.name.clear(), Code::InvalidArgument, "name: ")]
    #[case::long_name(|request: &mut wire::CreateSnapshotRequest| request.name = "s".repeat(129), Code::InvalidArgument, "name: ")]
    #[case::nul(|request: &mut wire::CreateSnapshotRequest| request.name.push('\0'), Code::InvalidArgument, "name: ")]
    #[case::source_not_found(|request: &mut wire::CreateSnapshotRequest| request.source_volume_id.clear(), Code::InvalidArgument, "source_volume_id: ")]
    #[case::hostile_source(|request: &mut wire::CreateSnapshotRequest| {
        request.source_volume_id = "../volumes/v".to_owned();
    }, Code::NotFound, "source_volume_id: ")]
    #[case::endless_source(|request: &mut wire::CreateSnapshotRequest| {
        request.source_volume_id = "v".repeat(1 << 20);
    }, Code::NotFound, "source_volume_id: ")]
    #[case::parameter(|request: &mut wire::CreateSnapshotRequest| {
        request.parameters = [("typo".to_owned(), String::new())].into();
    }, Code::InvalidArgument, "parameters: ")]
    fn an_invalid_field_is_refused(
        #[case] spoil: impl FnOnce(&mut wire::CreateSnapshotRequest),
        #[case] code: Code,
        #[case] field: &str,
    ) {
        let mut request = create();
        spoil(&mut request);
        let error = reader().create_snapshot(request).unwrap_err();
        assert_eq!(error.code(), code);
        assert!(error.to_string().starts_with(field), "{error}");
        assert!(error.to_string().len() < 512);
    }

    #[rstest]
    #[case::all("", "", Some((None, None)))]
    #[case::one("s", "", Some((Some("s"), None)))]
    #[case::of("", "v", Some((None, Some("v"))))]
    #[case::one_of("s", "v", Some((Some("s"), Some("v"))))]
    #[case::no_snapshot("../s", "", None)]
    #[case::no_volume("s", "a\0b", None)]
    fn a_filter_with_an_impossible_id_matches_nothing(
        #[case] snapshot: &str,
        #[case] source: &str,
        #[case] expected: Option<(Option<&str>, Option<&str>)>,
    ) {
        let found = filter(snapshot, source);
        let found = found.as_ref().map(|filter| {
            (filter.snapshot.as_ref().map(SnapshotId::as_str), filter.source.as_ref().map(VolumeId::as_str))
        });
        assert_eq!(found, expected);
    }

    #[rstest]
    #[case("snapshot-1", Some("snapshot-1"))]
    #[case("../../etc", None)]
    #[case(&"s".repeat(4096), None)]
    fn an_id_that_no_snapshot_can_have_counts_as_deleted(
        #[case] snapshot_id: &str,
        #[case] snapshot: Option<&str>,
    ) {
        let request =
            wire::DeleteSnapshotRequest { snapshot_id: snapshot_id.to_owned(), ..Default::default() };
        let found = reader().delete_snapshot(&request).unwrap();
        assert_eq!(found.as_ref().map(SnapshotId::as_str), snapshot);
        let request = wire::GetSnapshotRequest { snapshot_id: snapshot_id.to_owned(), ..Default::default() };
        let found = reader().get_snapshot(&request);
        assert_eq!(found.map(|id| id.to_string()).map_err(|error| error.code()), {
            snapshot.map(str::to_owned).ok_or(Code::NotFound)
        });
    }

    #[test]
    fn an_empty_snapshot_id_is_refused() {
        assert!(reader().delete_snapshot(&wire::DeleteSnapshotRequest::default()).is_err());
        let error = reader().get_snapshot(&wire::GetSnapshotRequest::default()).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
    }
}
