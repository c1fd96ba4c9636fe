//! Pruned objects: objects without `metadata.managedFields`, and claims without what this process does not read.
//!
//! The managed fields record which writer set which field. They are half of the bytes of a PersistentVolume and take more than
//! half of the time to parse, because each writer has a tree of maps. This process does not need them, so the deserializer skips
//! them. The parsed object is behind a pointer: a PersistentVolume takes about 3,500 bytes, and each of the dozen streams
//! through which a watch event passes would copy it.
//!
//! A tenant fills a claim with up to a megabyte of annotations, labels or names, and the caches of all nodes may hold that claim. So only
//! the fields of a claim that this process reads are kept, at no more than the length that a valid value has.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use k8s_openapi::api::core::v1::{
    ConfigMap, Node, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec,
};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    LabelSelector, ManagedFieldsEntry, ObjectMeta, OwnerReference, Time,
};
use kube::Resource;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::api::events::truncated;
use crate::objects::claim_status::{NODE_EXPANSION_NOT_REQUIRED, STORAGE};
use crate::objects::ownership::{SELECTED_NODE, STORAGE_PROVISIONER, STORAGE_PROVISIONER_BETA, provisioner};

/// The annotations of a claim that this process reads.
const CLAIM_ANNOTATIONS: [&str; 4] =
    [SELECTED_NODE, STORAGE_PROVISIONER, STORAGE_PROVISIONER_BETA, NODE_EXPANSION_NOT_REQUIRED];

/// An object without its managed fields.
#[derive(Debug, Clone)]
pub(crate) struct Pruned<K>(Box<K>);

impl<K> Pruned<K> {
    pub(crate) fn into_inner(self) -> K {
        *self.0
    }
}

impl<K> From<K> for Pruned<K> {
    fn from(object: K) -> Self {
        Pruned(Box::new(object))
    }
}

impl<K> Deref for Pruned<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.0
    }
}

impl<'de, K: Deserialize<'de> + Resource + Prune> Deserialize<'de> for Pruned<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PrunedVisitor(PhantomData))
    }
}

/// A type of object that is kept pruned.
pub(crate) trait Prune {
    /// Removes what this process does not read. Only administrators write most types, and those are kept as they are.
    fn prune(&mut self) {}
}

impl Prune for ConfigMap {}
impl Prune for CSINode {}
impl Prune for CSIStorageCapacity {}
impl Prune for Node {}
impl Prune for PersistentVolume {}
impl Prune for StorageClass {}

/// The longest name that is kept, in bytes: one more than a valid name has, so that no name becomes that of another object.
const NAME_KEPT: usize = 254;
/// The largest number of labels that are kept, more than a cluster has drivers like this one.
const LABELS_KEPT: usize = 8;

impl Prune for PersistentVolumeClaim {
    fn prune(&mut self) {
        let node_label = provisioner(self).map(|driver| format!("{driver}/node"));
        let metadata = &mut self.metadata;
        metadata.owner_references = None;
        metadata.generate_name = None;
        // Only whether there is one matters.
        metadata.finalizers.iter_mut().for_each(|finalizers| finalizers.truncate(1));
        if let Some(annotations) = &mut metadata.annotations {
            annotations.retain(|name, _| CLAIM_ANNOTATIONS.contains(&name.as_str()));
            annotations.values_mut().for_each(shorten);
        }
        if let Some(labels) = &mut metadata.labels {
            // The label with the node has the name of the driver, which a claim that was bound by hand does not name.
            labels.retain(|name, _| match &node_label {
                Some(known) => name == known,
                None => name.ends_with("/node"),
            });
            while labels.len() > LABELS_KEPT && labels.pop_last().is_some() {}
        }
        if let Some(spec) = &mut self.spec {
            prune_spec(spec);
        }
    }
}

fn prune_spec(spec: &mut PersistentVolumeClaimSpec) {
    // A claim with a selector is refused, whatever it selects.
    spec.selector.iter_mut().for_each(|selector| *selector = LabelSelector::default());
    if let Some(modes) = &mut spec.access_modes {
        modes.sort();
        modes.dedup();
        modes.shrink_to_fit();
    }
    if let Some(resources) = &mut spec.resources {
        resources.limits = None;
        resources.requests.iter_mut().for_each(|requests| requests.retain(|name, _| name == STORAGE));
    }
    let source = spec
        .data_source
        .iter_mut()
        .flat_map(|source| [Some(&mut source.kind), Some(&mut source.name), source.api_group.as_mut(), None]);
    let source_ref = spec.data_source_ref.iter_mut().flat_map(|source| {
        let (group, namespace) = (source.api_group.as_mut(), source.namespace.as_mut());
        [Some(&mut source.kind), Some(&mut source.name), group, namespace]
    });
    source.chain(source_ref).flatten().for_each(shorten);
    spec.volume_name.iter_mut().for_each(shorten);
}

fn shorten(text: &mut String) {
    if text.len() > NAME_KEPT {
        *text = truncated(text, NAME_KEPT).to_owned();
    }
}

impl<K: Serialize> Serialize for Pruned<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<K: Resource> Resource for Pruned<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

/// The visitor of an object. It parses the metadata apart from the other fields.
struct PrunedVisitor<K>(PhantomData<K>);

impl<'de, K: Deserialize<'de> + Resource + Prune> Visitor<'de> for PrunedVisitor<K> {
    type Value = Pruned<K>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Pruned<K>, A::Error> {
        let mut metadata = None;
        let other_fields = OtherFields { map, metadata: &mut metadata };
        let mut object = K::deserialize(MapAccessDeserializer::new(other_fields))?;
        if let Some(KeptMetadata(metadata)) = metadata {
            *object.meta_mut() = metadata;
        }
        object.prune();
        Ok(object.into())
    }
}

/// The fields of an object without its metadata, which is stored aside.
struct OtherFields<'a, A> {
    map: A,
    metadata: &'a mut Option<KeptMetadata>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for OtherFields<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        while let Some(key) = self.map.next_key::<String>()? {
            if key != "metadata" {
                return seed.deserialize(key.into_deserializer()).map(Some);
            }
            *self.metadata = self.map.next_value()?;
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}

#[derive(Deserialize)]
struct KeptMetadata(#[serde(with = "KeptMetadataFields")] ObjectMeta);

/// The fields of [`ObjectMeta`] but for the managed fields.
#[derive(Deserialize)]
#[serde(remote = "ObjectMeta", rename_all = "camelCase")]
struct KeptMetadataFields {
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_grace_period_seconds: Option<i64>,
    deletion_timestamp: Option<Time>,
    finalizers: Option<Vec<String>>,
    generate_name: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    #[serde(skip)]
    managed_fields: Option<Vec<ManagedFieldsEntry>>,
    name: Option<String>,
    namespace: Option<String>,
    owner_references: Option<Vec<OwnerReference>>,
    resource_version: Option<String>,
    self_link: Option<String>,
    uid: Option<String>,
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
    use kube::core::WatchEvent;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn written() -> Value {
        json!([{
            "manager": "kubectl", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:managedFields": {".": {}}}},
        }])
    }

    #[test]
    fn only_managed_fields_are_skipped() {
        let volume = fixtures::volume(json!({}));
        let mut text = serde_json::to_value(&volume).unwrap();
        text["metadata"]["managedFields"] = written();
        assert_eq!(
            serde_json::from_value::<Pruned<PersistentVolume>>(text.clone()).unwrap().into_inner(),
            volume
        );
        let event = json!({"type": "MODIFIED", "object": text}).to_string();
        let Ok(WatchEvent::Modified(read)) =
            serde_json::from_str::<WatchEvent<Pruned<PersistentVolume>>>(&event)
        else {
            panic!("{event}")
        };
        assert_eq!(read.into_inner(), volume);
    }

    #[test]
    fn managed_fields_elsewhere_are_kept() {
        let labels = json!({"managedFields": "mine", "metadata": "too"});
        let volume = fixtures::volume(json!({"metadata": {"labels": labels, "annotations": labels}}));
        let text = serde_json::to_string(&volume).unwrap();
        let read: Pruned<PersistentVolume> = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }

    #[test]
    fn a_usual_claim_is_kept_whole() {
        let claim = fixtures::bound_claim(json!({
            "metadata": {"labels": {"csi.loopfs.dev/node": "node-a"}, "annotations": {NODE_EXPANSION_NOT_REQUIRED: "true"}},
            "spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "other"}},
        }));
        let text = serde_json::to_string(&claim).unwrap();
        let read: Pruned<PersistentVolumeClaim> = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }

    /// Each is within the limits of the API server.
    #[rstest]
    #[case::annotations(json!({"metadata": {"annotations": {"a": "x".repeat(250 << 10)}}}))]
    #[case::a_long_node(json!({"metadata": {"annotations": {SELECTED_NODE: "x".repeat(250 << 10)}}}))]
    #[case::labels(json!({"metadata": {"labels": numbered(20_000, |number| (format!("a{number}/node"), json!("b")))}}))]
    #[case::owners(json!({"metadata": {"ownerReferences": vec![json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}); 10_000]}}))]
    #[case::finalizers(json!({"metadata": {"finalizers": vec!["example.com/keep"; 20_000]}}))]
    #[case::a_selector(json!({"spec": {"selector": {"matchLabels": numbered(20_000, |number| (format!("a{number}"), json!("b")))}}}))]
    #[case::access_modes(json!({"spec": {"accessModes": vec!["ReadWriteOnce"; 20_000]}}))]
    #[case::a_source(json!({"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "x".repeat(1 << 20)}}}))]
    #[case::a_foreign_source(json!({"spec": {"dataSourceRef": {"apiGroup": "x.dev", "kind": "x".repeat(1 << 20), "name": "b"}}}))]
    #[case::a_volume(json!({"spec": {"volumeName": "x".repeat(1 << 20)}}))]
    fn a_large_claim_takes_little_memory(#[case] change: Value) {
        let claim = serde_json::to_string(&fixtures::claim(change)).unwrap();
        assert!(claim.len() > 200 << 10);
        let read: Pruned<PersistentVolumeClaim> = serde_json::from_str(&claim).unwrap();
        let kept = serde_json::to_string(&read).unwrap();
        assert!(kept.len() < 2 << 10, "{kept}");
    }

    /// If a claim could hide its label, the nodes would watch all claims of the cluster.
    #[test]
    fn other_labels_hide_no_node() {
        let mut labels = numbered(100, |number| (format!("a{number}/node"), json!("b")));
        labels["csi.loopfs.dev/node"] = json!("node-a");
        let claim = fixtures::claim(json!({"metadata": {"labels": labels}}));
        let read: Pruned<PersistentVolumeClaim> =
            serde_json::from_value(serde_json::to_value(claim).unwrap()).unwrap();
        let kept = serde_json::to_value(&read.metadata.labels).unwrap();
        assert_eq!(kept, json!({"csi.loopfs.dev/node": "node-a"}));
    }

    fn numbered(count: usize, entry: impl Fn(usize) -> (String, Value)) -> Value {
        (0..count).map(entry).collect::<serde_json::Map<_, _>>().into()
    }

    #[rstest]
    #[case::no_metadata("{}")]
    #[case::metadata_of_nothing(r#"{"metadata": {}}"#)]
    #[case::null_metadata(r#"{"metadata": null}"#)]
    #[case::metadata_of_another_kind(r#"{"metadata": "text"}"#)]
    #[case::metadata_is_a_list(r#"{"metadata": [1]}"#)]
    #[case::another_version(r#"{"apiVersion": "v2", "metadata": {}}"#)]
    #[case::no_object("[]")]
    #[case::nothing("null")]
    #[case::cut_off(r#"{"metadata": {"managedFields": [{"#)]
    fn pruning_rejects_the_same_invalid_objects(#[case] text: &str) {
        let lean = serde_json::from_str::<Pruned<PersistentVolume>>(text).ok().map(Pruned::into_inner);
        assert_eq!(lean, serde_json::from_str::<PersistentVolume>(text).ok());
    }
}
