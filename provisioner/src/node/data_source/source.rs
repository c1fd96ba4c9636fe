//! The object that a claim names as its data source.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimSpec};
use loopfs::Bytes;
use loopfs::volume_store::OwnedContentSource;

use crate::objects::{refusal::Refusal, snapshot};

/// The volume or snapshot to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataSource {
    pub(crate) id: OwnedContentSource,
    /// The volume mode; `None` if it is unknown.
    pub(crate) mode: Option<String>,
    /// The smallest capacity of a copy.
    pub(crate) capacity: Bytes,
}

/// A reference to the object to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataSourceRef<'a> {
    Claim(&'a str),
    Snapshot(&'a str),
}

/// Parses the data source of a claim. Returns `None` if it has none.
///
/// # Errors
/// [`Refusal::DataSource`] if it is neither a claim nor a VolumeSnapshot of the claim's namespace.
pub(crate) fn parse_reference(claim: &PersistentVolumeClaim) -> Result<Option<DataSourceRef<'_>>, Refusal> {
    let Some(PersistentVolumeClaimSpec { data_source, data_source_ref, .. }) = &claim.spec else {
        return Ok(None);
    };
    // The API server copies `dataSource` and `dataSourceRef` to each other. Only `dataSourceRef` may name another namespace.
    let older = data_source.as_ref().map(|source| (source.api_group.as_deref(), &source.kind, &source.name));
    let newer =
        data_source_ref.as_ref().map(|source| (source.api_group.as_deref(), &source.kind, &source.name));
    let Some((group, kind, name)) = newer.or(older) else { return Ok(None) };
    let namespace = data_source_ref.as_ref().and_then(|source| source.namespace.as_ref());
    let ambiguous = older.zip(newer).is_some_and(|(older, newer)| older != newer);
    let local = namespace.is_none() || namespace == claim.metadata.namespace.as_ref();
    match (group.unwrap_or_default(), kind.as_str()) {
        ("", "PersistentVolumeClaim") if local && !ambiguous => Ok(Some(DataSourceRef::Claim(name))),
        (snapshot::GROUP, snapshot::KIND) if local && !ambiguous => Ok(Some(DataSourceRef::Snapshot(name))),
        _ => Err(Refusal::DataSource(format!("{kind} {name:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn local(name: &str) -> Value {
        json!({"kind": "PersistentVolumeClaim", "name": name})
    }

    #[rstest]
    #[case::nothing(json!({}), Ok(None))]
    #[case::older(json!({"dataSource": local("a")}), Ok(Some(DataSourceRef::Claim("a"))))]
    #[case::newer(json!({"dataSourceRef": local("a")}), Ok(Some(DataSourceRef::Claim("a"))))]
    #[case::both(json!({"dataSource": local("a"), "dataSourceRef": local("a")}), Ok(Some(DataSourceRef::Claim("a"))))]
    #[case::empty_group(json!({"dataSource": {"apiGroup": "", "kind": "PersistentVolumeClaim", "name": "a"}}), Ok(Some(DataSourceRef::Claim("a"))))]
    #[case::own_namespace(json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "a", "namespace": "shop"}}), Ok(Some(DataSourceRef::Claim("a"))))]
    #[case::other_namespace(json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "a", "namespace": "bank"}}), Err("PersistentVolumeClaim \"a\""))]
    #[case::two(json!({"dataSource": local("a"), "dataSourceRef": local("b")}), Err("PersistentVolumeClaim \"b\""))]
    #[case::snapshot(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}}), Ok(Some(DataSourceRef::Snapshot("s"))))]
    #[case::snapshot_of_another_namespace(json!({"dataSourceRef": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s", "namespace": "bank"}}), Err("VolumeSnapshot \"s\""))]
    #[case::content(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshotContent", "name": "s"}}), Err("VolumeSnapshotContent"))]
    #[case::foreign_group(json!({"dataSource": {"apiGroup": "x.dev", "kind": "PersistentVolumeClaim", "name": "a"}}), Err("\"a\""))]
    fn a_data_source_must_be_a_claim_or_a_snapshot_of_the_namespace(
        #[case] spec: Value,
        #[case] expected: Result<Option<DataSourceRef<'_>>, &str>,
    ) {
        let claim = fixtures::claim(json!({"spec": spec}));
        match (parse_reference(&claim), expected) {
            (Ok(name), Ok(expected)) => assert_eq!(name, expected),
            (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}
