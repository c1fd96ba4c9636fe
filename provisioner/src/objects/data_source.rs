//! The object that a claim names as its data source.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimSpec};

use crate::objects::refusal::Refusal;
use crate::objects::snapshot;

/// A reference to the object that the content of a volume comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataSourceRef<'a> {
    /// An object that the provisioner copies.
    Copied(CopiedRef<'a>),
    /// An object of another kind. A volume populator has a volume provisioned for a claim of its own, fills it, and binds its
    /// PersistentVolume to this claim.
    Populated { kind: &'a str, name: &'a str },
}

/// A reference to an object of the claim's namespace that the provisioner copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopiedRef<'a> {
    Claim(&'a str),
    Snapshot(&'a str),
}

/// Returns `true` if a volume populator provides the volume of the claim.
pub(crate) fn is_populated(claim: &PersistentVolumeClaim) -> bool {
    matches!(parse_reference(claim), Ok(Some(DataSourceRef::Populated { .. })))
}

/// Parses the data source of a claim. Returns `None` if it has none.
///
/// # Errors
/// [`Refusal::DataSource`] if it is a claim or a VolumeSnapshot of another namespace.
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
    let copied = match (group.unwrap_or_default(), kind.as_str()) {
        ("", "PersistentVolumeClaim") => CopiedRef::Claim(name),
        (snapshot::GROUP, snapshot::KIND) => CopiedRef::Snapshot(name),
        _ => return Ok(Some(DataSourceRef::Populated { kind, name })),
    };
    if local && !ambiguous {
        Ok(Some(DataSourceRef::Copied(copied)))
    } else {
        Err(Refusal::DataSource(format!("{kind} {name:?}")))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    const CLAIM: DataSourceRef<'_> = DataSourceRef::Copied(CopiedRef::Claim("a"));
    const SNAPSHOT: DataSourceRef<'_> = DataSourceRef::Copied(CopiedRef::Snapshot("s"));

    fn local(name: &str) -> Value {
        json!({"kind": "PersistentVolumeClaim", "name": name})
    }

    fn populated<'a>(kind: &'a str, name: &'a str) -> DataSourceRef<'a> {
        DataSourceRef::Populated { kind, name }
    }

    #[rstest]
    #[case::nothing(json!({}), Ok(None))]
    #[case::older(json!({"dataSource": local("a")}), Ok(Some(CLAIM)))]
    #[case::newer(json!({"dataSourceRef": local("a")}), Ok(Some(CLAIM)))]
    #[case::both(json!({"dataSource": local("a"), "dataSourceRef": local("a")}), Ok(Some(CLAIM)))]
    #[case::empty_group(json!({"dataSource": {"apiGroup": "", "kind": "PersistentVolumeClaim", "name": "a"}}), Ok(Some(CLAIM)))]
    #[case::own_namespace(json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "a", "namespace": "shop"}}), Ok(Some(CLAIM)))]
    #[case::other_namespace(json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "a", "namespace": "bank"}}), Err("PersistentVolumeClaim \"a\""))]
    #[case::two(json!({"dataSource": local("a"), "dataSourceRef": local("b")}), Err("PersistentVolumeClaim \"b\""))]
    #[case::snapshot(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}}), Ok(Some(SNAPSHOT)))]
    #[case::snapshot_of_another_namespace(json!({"dataSourceRef": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s", "namespace": "bank"}}), Err("VolumeSnapshot \"s\""))]
    #[case::content(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshotContent", "name": "s"}}), Ok(Some(populated("VolumeSnapshotContent", "s"))))]
    #[case::foreign_group(json!({"dataSource": {"apiGroup": "x.dev", "kind": "PersistentVolumeClaim", "name": "a"}}), Ok(Some(populated("PersistentVolumeClaim", "a"))))]
    #[case::of_a_populator(json!({"dataSourceRef": {"apiGroup": "x.dev", "kind": "Backup", "name": "b", "namespace": "bank"}}), Ok(Some(populated("Backup", "b"))))]
    fn data_sources(#[case] spec: Value, #[case] expected: Result<Option<DataSourceRef<'_>>, &str>) {
        let claim = fixtures::claim(json!({"spec": spec}));
        match (parse_reference(&claim), expected) {
            (Ok(name), Ok(expected)) => assert_eq!(name, expected),
            (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}
