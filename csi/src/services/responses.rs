//! CSI responses about volumes and snapshots.

use csi_wire::csi as wire;
use csi_wire::csi::list_volumes_response;
use csi_wire::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use loopfs::Bytes;
use loopfs::volume_store::{OwnedContentSource, Snapshot};

use super::controller::ControllerService;
use super::rpc::signed;
use crate::volumes::VolumeInfo;

impl ControllerService {
    pub(super) fn volume(&self, info: &VolumeInfo) -> wire::Volume {
        wire::Volume {
            capacity_bytes: info.capacity.map_or(0, |Bytes(capacity)| signed(capacity)),
            volume_id: info.volume.to_string(),
            volume_context: info
                .filesystem
                .map(|uuid| (self.filesystem_uuid_key.clone(), uuid.to_string()))
                .into_iter()
                .collect(),
            content_source: info.source.as_ref().map(content_source),
            accessible_topology: vec![self.node.topology()],
        }
    }

    pub(super) fn published_node_ids(&self, info: &VolumeInfo) -> Vec<String> {
        info.published.then(|| self.node.name().to_owned()).into_iter().collect()
    }

    pub(super) fn entry(&self, info: VolumeInfo) -> list_volumes_response::Entry {
        list_volumes_response::Entry {
            volume: Some(self.volume(&info)),
            status: Some(list_volumes_response::VolumeStatus {
                published_node_ids: self.published_node_ids(&info),
                volume_condition: Some(super::health::condition(info.condition)),
            }),
        }
    }

    pub(super) fn snapshot(&self, snapshot: &Snapshot) -> wire::Snapshot {
        wire::Snapshot {
            // The minimum capacity of a volume that is created from it.
            size_bytes: signed(snapshot.capacity().0),
            snapshot_id: snapshot.id().to_string(),
            source_volume_id: snapshot.source().to_string(),
            creation_time: Some(snapshot.created().into()),
            // A snapshot appears only when it is complete.
            ready_to_use: true,
            group_snapshot_id: String::new(),
            accessible_topology: vec![self.node.topology()],
        }
    }
}

fn content_source(source: &OwnedContentSource) -> wire::VolumeContentSource {
    let source = match source {
        OwnedContentSource::Volume(id) => Type::Volume(VolumeSource { volume_id: id.to_string() }),
        OwnedContentSource::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.to_string() }),
    };
    wire::VolumeContentSource { r#type: Some(source) }
}
