//! Snapshots: the parts of the Controller service's RPCs about them. `controller.rs` creates volumes from snapshots.

use csi_wire::{csi as wire, reserved};
use loopfs::ErrorKind;
use loopfs::publish::Publisher;
use loopfs::volume_store::{Snapshot, SnapshotId, VolumeId};

use super::inventory::{Page, page};
use super::rpc::{Volumes, found, signed};
use crate::driver::ThisNode;
use crate::error::{Error, InvalidRequest, Result};
use crate::request::{ListRequest, RequestReader, existing_id, id_of_name, require_non_empty};

impl RequestReader {
    /// Returns the snapshot to create, its source, and `true` if a snapshot on this node satisfies the request.
    pub(super) fn create_snapshot(
        &self,
        request: wire::CreateSnapshotRequest,
    ) -> Result<(SnapshotId, VolumeId, bool)> {
        const SOURCE: &str = "source_volume_id";
        let snapshot = id_of_name(&request.name)?;
        require_non_empty(SOURCE, &request.source_volume_id)?;
        let unknown = request.parameters.keys().filter(|name| !reserved::is_of_snapshot(name));
        if let Some(name) = unknown.min() {
            let problem = format!("unknown parameter {name:?}; snapshots have no parameters");
            return Err(InvalidRequest::new("parameters", problem).into());
        }
        let source = existing_id(SOURCE, "volume", &request.source_volume_id)?;
        Ok((snapshot, source, self.is_accessible(request.accessibility_requirements)))
    }
}

/// A filter for snapshots. All conditions must hold.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) snapshot: Option<SnapshotId>,
    pub(super) source: Option<VolumeId>,
}

impl Filter {
    /// Returns `None` if no snapshot or volume can have one of the ids.
    pub(super) fn parse(snapshot: &str, source: &str) -> Option<Self> {
        let snapshot = (!snapshot.is_empty()).then(|| SnapshotId::parse(snapshot)).transpose().ok()?;
        let source = (!source.is_empty()).then(|| VolumeId::parse(source)).transpose().ok()?;
        Some(Self { snapshot, source })
    }
}

impl Volumes {
    /// Creates a snapshot, or returns the existing one if it has the requested source. If `is_wanted` returns `false`, the copy ends.
    pub(super) fn create_snapshot(
        &self,
        id: &SnapshotId,
        source: &VolumeId,
        accessible_here: bool,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Snapshot> {
        let publisher = self.monitor.verified()?;
        let existing = found(publisher.store().snapshot(id))?;
        if !accessible_here {
            let text = format!("accessibility_requirements: snapshot {id} must be on other nodes");
            return Err(match existing {
                Some(_) => Error::Incompatible(format!("{text}, but it exists on this node")),
                None => Error::NotOnThisNode(format!(
                    "{text}, but this driver creates snapshots only on its own node"
                )),
            });
        }
        if existing.is_none() {
            let volume = publisher.store().volume(source).map_err(|error| match error.kind() {
                ErrorKind::NotFound => Error::SourceNotFound(format!("source_volume_id: {error}")),
                _ => error.into(),
            })?;
            publisher.flush(&volume)?;
        }
        // This call is repeated for an existing snapshot: the process that created it may have died before the snapshot
        // was durable.
        // OUT_OF_RANGE for a lack of space: csi-snapshotter treats RESOURCE_EXHAUSTED as a snapshot that may still be taken, and the user
        // could delete neither that nor the claim of its source.
        let created = publisher.store().create_snapshot_while(source, id, is_wanted)?;
        self.changes.space();
        Ok(created)
    }

    /// Deletes a snapshot. Volumes that were created from it are unaffected. Its space is freed in the background.
    pub(super) fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let publisher = self.monitor.verified()?;
        publisher.store().delete_snapshot(id)?;
        self.trash_cleanup.request();
        self.changes.space();
        Ok(())
    }

    /// Returns one snapshot.
    pub(super) fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        let publisher = self.monitor.verified()?;
        found(publisher.store().snapshot(id))?.ok_or_else(|| Error::NoSuchSnapshot(id.clone()))
    }

    /// Returns the matching snapshots in the order of their ids, or none if `filter` is `None`. Skips and logs snapshots that cannot be read: the
    /// response has no field for such an error, and one unreadable snapshot must not hide the others.
    pub(super) fn list_snapshots(
        &self,
        list: &ListRequest<SnapshotId>,
        filter: Option<&Filter>,
    ) -> Result<Page<Snapshot>> {
        let publisher = self.monitor.verified()?;
        let Some(Filter { snapshot, source }) = filter else {
            return Ok(Page { items: Vec::new(), next_token: String::new() });
        };
        let mut ids = match snapshot {
            Some(id) => vec![id.clone()],
            None => publisher.store().snapshots()?,
        };
        ids.sort_unstable();
        let is_of_source =
            |snapshot: &Snapshot| source.as_ref().is_none_or(|source| snapshot.source() == source);
        page(list, ids, |id| Ok(readable(&publisher, id).filter(is_of_source)))
    }
}

fn readable(publisher: &Publisher, id: &SnapshotId) -> Option<Snapshot> {
    found(publisher.store().snapshot(id)).unwrap_or_else(|error| {
        tracing::warn!(snapshot = %id, %error, "skipped a snapshot that cannot be read");
        None
    })
}

/// Returns the message about a snapshot of this node.
pub(super) fn message(snapshot: &Snapshot, node: &ThisNode) -> wire::Snapshot {
    wire::Snapshot {
        // The minimum capacity of a volume that is created from it.
        size_bytes: signed(snapshot.capacity().0),
        snapshot_id: snapshot.id().to_string(),
        source_volume_id: snapshot.source().to_string(),
        creation_time: Some(snapshot.created().into()),
        // A snapshot appears only when it is complete.
        ready_to_use: true,
        group_snapshot_id: String::new(),
        accessible_topology: vec![node.topology()],
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tonic::Code;

    use super::*;
    use crate::request::tests::reader;

    fn create() -> wire::CreateSnapshotRequest {
        wire::CreateSnapshotRequest {
            name: "snapshot-1".to_owned(),
            source_volume_id: "pvc-1".to_owned(),
            ..wire::CreateSnapshotRequest::default()
        }
    }

    #[test]
    fn parameters_of_csi_snapshotter_are_accepted() {
        // csi-snapshotter adds these with --extra-create-metadata.
        let parameters = ["volumesnapshot/name", "volumesnapshot/namespace", "volumesnapshotcontent/name"]
            .map(|name| (format!("csi.storage.k8s.io/{name}"), "s".to_owned()))
            .into();
        let request = wire::CreateSnapshotRequest { parameters, ..create() };
        let expected = ("snapshot-1".parse().unwrap(), "pvc-1".parse().unwrap(), true);
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
    fn filter_with_impossible_id_matches_nothing(
        #[case] snapshot: &str,
        #[case] source: &str,
        #[case] expected: Option<(Option<&str>, Option<&str>)>,
    ) {
        let found = Filter::parse(snapshot, source);
        let found = found.as_ref().map(|filter| {
            (filter.snapshot.as_ref().map(SnapshotId::as_str), filter.source.as_ref().map(VolumeId::as_str))
        });
        assert_eq!(found, expected);
    }
}
