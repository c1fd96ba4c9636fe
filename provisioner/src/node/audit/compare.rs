//! Compares the volumes of the node with the PersistentVolumes that name them.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt;
use loopfs::volume_store::VolumeId;

use super::findings::AuditFindings;
use crate::objects::identity::Identity;
use crate::objects::{ownership, pv};
use crate::store::driver::VolumeList;

/// Returns the orphaned volumes, and the PersistentVolumes without a volume. Pure.
pub(crate) fn compare<'a>(
    node: &VolumeList,
    objects: impl IntoIterator<Item = &'a PersistentVolume>,
    identity: &Identity,
) -> AuditFindings {
    let mut findings = AuditFindings::default();
    let mut named = BTreeSet::new();
    for object in objects {
        named.extend(handle_on_this_node(object, node, identity));
        if let Some(why) = missing(object, node, identity) {
            findings.missing.insert(object.name_any(), why);
        }
    }
    let is_orphan = |id: &&VolumeId| !named.contains(id.as_str()) && !node.pending.contains_key(*id);
    findings.orphans = node.volumes.iter().filter(is_orphan).cloned().collect();
    findings
}

/// Returns the volume handle of a PersistentVolume of this driver, unless its data is certainly on another node.
fn handle_on_this_node<'a>(
    object: &'a PersistentVolume,
    node: &VolumeList,
    identity: &Identity,
) -> Option<&'a str> {
    let csi = ownership::csi(object, identity)?;
    let elsewhere = ownership::is_data_elsewhere(object, &node.filesystem_uuid, identity);
    (!elsewhere).then_some(csi.volume_handle.as_str())
}

/// Returns why a PersistentVolume of this node has no volume, or `None` if it has one.
fn missing(object: &PersistentVolume, node: &VolumeList, identity: &Identity) -> Option<String> {
    // The volume is about to be deleted, or was just deleted.
    let is_being_deleted = object.metadata.deletion_timestamp.is_some() || pv::is_discarded(object);
    if !ownership::is_our_volume(object, identity) || is_being_deleted {
        return None;
    }
    let id = match ownership::volume_id(object, identity) {
        Ok(id) => id,
        Err(error) => return Some(error.to_string()),
    };
    match ownership::filesystem_uuid(object, identity) {
        Some(uuid) if uuid != node.filesystem_uuid && node.volumes.contains(&id) => Some(format!(
            "volume {id} was created on file system {uuid}, but node {} has it on file system {}; if the UUID of the file system was \
             changed, change it back (xfs_admin -U {uuid})",
            identity.node(),
            node.filesystem_uuid
        )),
        Some(uuid) if uuid != node.filesystem_uuid => Some(format!(
            "volume {id} is on file system {uuid}, but node {} now has file system {}; bring the disk back, or delete the claim",
            identity.node(),
            node.filesystem_uuid
        )),
        _ if node.volumes.contains(&id) => None,
        _ => Some(format!(
            "there is no volume {id} on node {}; restore it from a backup, or delete the claim",
            identity.node()
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::store::claim_record::ClaimRecord;
    use crate::testing::fixtures;

    const OTHER_DISK: &str = "00000000-0000-4000-8000-000000000000";
    const NODE: &str = "csi.loopfs.dev/node";
    const UUID: &str = "csi.loopfs.dev/filesystem-uuid";

    fn ids(names: &[&str]) -> BTreeSet<VolumeId> {
        names.iter().map(|name| VolumeId::parse(name).unwrap()).collect()
    }

    fn held(volumes: &[&str], pending: &[&str]) -> VolumeList {
        let record = ClaimRecord::of(&fixtures::claim(json!({})));
        VolumeList {
            volumes: ids(volumes),
            pending: ids(pending).into_iter().map(|id| (id, record.clone())).collect(),
            filesystem_uuid: fixtures::FILESYSTEM.to_owned(),
        }
    }

    fn orphans(node: &VolumeList, objects: &[PersistentVolume]) -> BTreeSet<VolumeId> {
        compare(node, objects, &fixtures::identity()).orphans
    }

    #[rstest]
    #[case::its_object(json!({}))]
    #[case::retained(json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))]
    #[case::created_by_a_person(json!({"metadata": {"name": "mine", "labels": null}}))]
    #[case::labelled_wrongly(json!({"metadata": {"labels": {NODE: "node-b"}}}))]
    #[case::names_no_disk_and_another_node(json!({"metadata": {"labels": {NODE: "node-b"}}, "spec": {"csi": {"volumeAttributes": null}}}))]
    #[case::of_another_disk_here(json!({"spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}))]
    fn named_volume_is_not_orphaned(#[case] change: Value) {
        assert_eq!(orphans(&held(&[fixtures::VOLUME], &[]), &[fixtures::volume(change)]), ids(&[]));
    }

    #[rstest]
    #[case::of_another_driver(json!({"spec": {"csi": {"driver": "csi.other.dev"}}}))]
    #[case::of_another_volume(json!({"spec": {"csi": {"volumeHandle": "pvc-another"}}}))]
    #[case::elsewhere(json!({"metadata": {"labels": {NODE: "node-b"}}, "spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}))]
    fn unnamed_volume_is_orphaned(#[case] change: Value) {
        let node = held(&[fixtures::VOLUME], &[]);
        assert_eq!(orphans(&node, &[fixtures::volume(change)]), node.volumes);
    }

    #[test]
    fn pending_volume_is_not_orphaned() {
        assert_eq!(orphans(&held(&["pvc-1", "pvc-2"], &["pvc-1", "pvc-3"]), &[]), ids(&["pvc-2"]));
    }

    #[rstest]
    #[case::there(json!({}), &[fixtures::VOLUME], None)]
    #[case::no_volume(json!({}), &[], Some("there is no volume"))]
    #[case::other_disk(json!({"spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}), &[], Some("bring the disk back"))]
    #[case::changed_uuid(json!({"spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}), &[fixtures::VOLUME], Some("xfs_admin -U"))]
    #[case::no_handle(json!({"spec": {"csi": {"volumeHandle": "../etc"}}}), &[], Some("not a volume id"))]
    #[case::released(json!({"status": {"phase": "Released"}}), &[], None)]
    #[case::retained(json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), &[], Some("there is no volume"))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), &[], None)]
    #[case::elsewhere(json!({"metadata": {"labels": {NODE: "node-b"}}}), &[], None)]
    fn persistent_volumes_without_volume_are_found(
        #[case] change: Value,
        #[case] there: &[&str],
        #[case] why: Option<&str>,
    ) {
        let object = fixtures::volume(change);
        let mut found = compare(&held(there, &[]), [&object], &fixtures::identity()).missing;
        let reason = found.remove(&object.name_any());
        assert_eq!(reason.is_some(), why.is_some());
        assert!(reason.unwrap_or_default().contains(why.unwrap_or_default()));
    }

    #[test]
    fn only_findings_of_both_are_reported() {
        let missing = |names: &[&str]| {
            names.iter().map(|name| ((*name).to_owned(), "later".to_owned())).collect::<BTreeMap<_, _>>()
        };
        let first = AuditFindings { orphans: ids(&["a", "b"]), missing: missing(&["x", "y"]) };
        let later = AuditFindings { orphans: ids(&["b", "c"]), missing: missing(&["y", "z"]) };
        let confirmed = AuditFindings { orphans: ids(&["b"]), missing: missing(&["y"]) };
        assert_eq!(first.confirmed_by(later), confirmed);
    }
}
