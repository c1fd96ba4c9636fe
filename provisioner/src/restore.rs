//! Objects for the volumes of a node whose cluster was lost, from what `loopfs --json store list` prints.
//!
//! The PersistentVolumes have the reclaim policy Retain: the cluster is new, and an administrator decides whose data this is. Each names
//! its claim without a UID, because the new claim has another one, and each claim names its PersistentVolume, so that they bind only to each
//! other.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use loopfs::Bytes;
use loopfs::volume_store::{Annotations, VolumeId, VolumeKind};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::objects::claim_status::STORAGE;
use crate::objects::identity::Identity;
use crate::objects::loss_policy::Policy;
use crate::objects::pv::{self, Description, ReclaimPolicy};
use crate::objects::quantity;
use crate::store::claim_record::ClaimRecord;

/// What `loopfs --json store list` prints, without what is not needed.
#[derive(Debug, Deserialize)]
struct RestoreInput {
    filesystem_uuid: String,
    volumes: Vec<Listed>,
    snapshots: Vec<ListedSnapshot>,
}

/// A volume. The fields of one that cannot be read are null.
#[derive(Debug, Deserialize)]
struct Listed {
    id: String,
    kind: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
    pending: Option<bool>,
    capacity_bytes: Option<u64>,
    problem: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ListedSnapshot {
    id: String,
}

/// A volume whose claim is known.
struct Recorded {
    id: VolumeId,
    kind: VolumeKind,
    capacity: Bytes,
    record: ClaimRecord,
}

/// Reads a list of volumes from `input`. Returns the objects as a list that kubectl accepts, and the notes.
///
/// # Errors
/// When the input is not such a list.
pub(crate) fn restore(input: impl Read, identity: &Identity) -> anyhow::Result<(Value, Vec<String>)> {
    let listing: RestoreInput = serde_json::from_reader(input)
        .context("read the volumes from the standard input, which must be the output of `loopfs --json store list DIR`")?;
    let (items, notes) = objects(listing, identity);
    Ok((json!({"apiVersion": "v1", "kind": "List", "items": items}), notes))
}

/// Returns the objects, and a note on each volume that is not restored completely, and on the snapshots.
fn objects(listing: RestoreInput, identity: &Identity) -> (Vec<Value>, Vec<String>) {
    let (mut items, mut notes) = (Vec::new(), Vec::new());
    let mut recorded = Vec::new();
    for listed in listing.volumes {
        let id = listed.id.clone();
        match read(listed) {
            Ok(volume) => recorded.push(volume),
            Err(reason) => notes.push(format!("volume {id} is left out: {reason}")),
        }
    }
    let mut names = BTreeSet::new();
    let name = |volume: &Recorded| (volume.record.namespace.clone(), volume.record.name.clone());
    let repeated: BTreeSet<_> =
        recorded.iter().map(name).filter(|name| !names.insert(name.clone())).collect();
    for volume in recorded {
        let claim = claim_of(&volume);
        let description = Description {
            claim: &claim,
            id: &volume.id,
            kind: volume.kind,
            capacity: volume.capacity,
            filesystem_uuid: listing.filesystem_uuid.clone(),
            reclaim_policy: ReclaimPolicy::Retain,
            mount_options: None,
            node_loss: Policy::default(),
        };
        items.push(json!(pv::build(description, identity)));
        if repeated.contains(&name(&volume)) {
            notes.push(format!(
                "claim {}/{} is left out, because several volumes were created for claims of this name, {} for example; create it with the \
                 right one as its volumeName",
                volume.record.namespace, volume.record.name, volume.id
            ));
        } else {
            items.push(json!(claim));
        }
    }
    if !listing.snapshots.is_empty() {
        notes.push(format!(
            "snapshots are left out: {}; to restore the VolumeSnapshot of each, follow the section \"Import a snapshot\" of \
             docs/src/snapshots.md",
            listing.snapshots.iter().map(|snapshot| snapshot.id.as_str()).collect::<Vec<_>>().join(", ")
        ));
    }
    (items, notes)
}

/// Returns the volume, or the reason why it cannot be restored.
fn read(listed: Listed) -> Result<Recorded, String> {
    let Listed { id, kind, annotations, pending, capacity_bytes, problem } = listed;
    let id = VolumeId::parse(&id).map_err(|error| error.to_string())?;
    let (Some(kind), Some(annotations), Some(capacity)) = (kind, annotations, capacity_bytes) else {
        return Err(problem.unwrap_or_else(|| "it could not be read".to_owned()));
    };
    let kind = pv::kind_of_mode(&kind).ok_or_else(|| format!("its kind {kind:?} is unknown"))?;
    if pending == Some(true) {
        return Err("its claim had no PersistentVolume yet, so it is empty or an incomplete copy".to_owned());
    }
    let annotations = Annotations::new(annotations).map_err(|error| error.to_string())?;
    let record = ClaimRecord::parse(&annotations).ok_or("its claim was not recorded")?;
    Ok(Recorded { id, kind, capacity: Bytes(capacity), record })
}

fn claim_of(volume: &Recorded) -> PersistentVolumeClaim {
    let Recorded { id, kind, capacity, record } = volume;
    let size = BTreeMap::from([(STORAGE.to_owned(), quantity::format(*capacity))]);
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(record.name.clone()),
            namespace: Some(record.namespace.clone()),
            ..Default::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            resources: Some(VolumeResourceRequirements { requests: Some(size), ..Default::default() }),
            storage_class_name: Some(record.class.clone()),
            volume_mode: Some(kind.to_string()),
            volume_name: Some(id.to_string()),
            ..Default::default()
        }),
        status: None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rstest::rstest;

    use super::*;
    use crate::testing::fixtures;

    /// Returns the entry of a volume that was created for a claim.
    pub(crate) fn listed(id: &str, namespace: &str, name: &str, class: &str) -> Value {
        json!({
            "id": id, "kind": "Filesystem", "capacity_bytes": 1 << 20, "pending": false, "healthy": true, "problem": null,
            "annotations": {"claim": format!("{namespace}/{name}"), "uid": "u", "class": class},
        })
    }

    pub(crate) fn restored(volumes: &[Value]) -> (Value, Vec<String>) {
        let listing = json!({"filesystem_uuid": fixtures::FILESYSTEM, "volumes": volumes, "snapshots": []});
        restore(listing.to_string().as_bytes(), &fixtures::identity()).unwrap()
    }

    fn kinds(list: &Value) -> Vec<&str> {
        list["items"].as_array().unwrap().iter().map(|item| item["kind"].as_str().unwrap()).collect()
    }

    #[test]
    fn volume_gets_its_objects_back() {
        let (list, notes) = restored(&[listed("pvc-1", "shop", "data", "fast")]);
        assert_eq!(notes, Vec::<String>::new());
        assert_eq!(kinds(&list), ["PersistentVolume", "PersistentVolumeClaim"]);
        let (volume, claim) = (&list["items"][0], &list["items"][1]);
        assert_eq!(volume["spec"]["persistentVolumeReclaimPolicy"], "Retain");
        assert_eq!(volume["metadata"]["finalizers"], Value::Null);
        let claim_ref =
            json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "shop", "name": "data"});
        assert_eq!(volume["spec"]["claimRef"], claim_ref);
        assert_eq!(volume["spec"]["csi"]["volumeHandle"], "pvc-1");
        assert_eq!(claim["spec"]["volumeName"], "pvc-1");
        assert_eq!(claim["spec"]["storageClassName"], "fast");
        assert_eq!(claim["spec"]["resources"]["requests"], volume["spec"]["capacity"]);
    }

    #[rstest]
    #[case::unreadable(json!({"kind": null, "annotations": null, "capacity_bytes": null, "problem": "no limits"}), "no limits")]
    #[case::pending(json!({"pending": true}), "no PersistentVolume yet")]
    #[case::without_a_record(json!({"annotations": {"claim": "shop/data", "uid": null}}), "was not recorded")]
    #[case::unknown_kind(json!({"kind": "Tape"}), "is unknown")]
    #[case::invalid_id(json!({"id": "../a"}), "starts with a dot")]
    #[case::invalid_annotation(json!({"annotations": {"claim": "a b"}}), "space")]
    fn volume_is_skipped_with_reason(#[case] change: Value, #[case] reason: &str) {
        let mut volume = listed("pvc-1", "shop", "data", "fast");
        fixtures::merge(&mut volume, change);
        let (list, notes) = restored(&[volume]);
        assert_eq!(kinds(&list), Vec::<&str>::new());
        assert!(notes.len() == 1 && notes[0].contains(reason), "{notes:?}");
    }

    #[test]
    fn ambiguous_claim_is_left_to_administrator() {
        let (list, notes) =
            restored(&[listed("pvc-1", "shop", "data", "fast"), listed("pvc-2", "shop", "data", "fast")]);
        assert_eq!(kinds(&list), ["PersistentVolume", "PersistentVolume"]);
        assert_eq!(notes.len(), 2);
    }

    #[test]
    fn snapshots_are_left_to_administrator() {
        let snapshots = json!([{"id": "snapshot-1", "kind": "Block"}, {"id": "snapshot-2", "kind": null}]);
        let listing = json!({"filesystem_uuid": fixtures::FILESYSTEM, "volumes": [], "snapshots": snapshots});
        let (list, notes) = restore(listing.to_string().as_bytes(), &fixtures::identity()).unwrap();
        assert_eq!(kinds(&list), Vec::<&str>::new());
        assert!(notes.len() == 1 && notes[0].contains("snapshot-1, snapshot-2; "), "{notes:?}");
    }

    #[test]
    fn invalid_input_error_names_command() {
        let error = restore(&b"ID  CLAIM"[..], &fixtures::identity()).unwrap_err();
        assert!(format!("{error:#}").contains("loopfs --json store list"), "{error:#}");
    }
}
