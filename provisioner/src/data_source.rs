//! What a claim's volume is to be filled with: nothing, or what another claim of its namespace holds, or a VolumeSnapshot of it.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec};
use kube::ResourceExt;
use loopfs::{Bytes, OwnedContentSource};

use crate::{
    absence, claim_status::recorded, context::Context, error::Error, identity::Identity, ownership,
    refusal::Refusal,
};

pub(crate) mod snapshot;

/// What to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) id: OwnedContentSource,
    /// None where it is not known.
    pub(crate) mode: Option<String>,
    /// The least that a copy can have.
    pub(crate) capacity: Bytes,
}

/// The object to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named<'a> {
    Claim(&'a str),
    Snapshot(&'a str),
}

/// The object to copy, if any.
///
/// # Errors
/// [`Refusal::DataSource`] for any other source.
pub(crate) fn named(claim: &PersistentVolumeClaim) -> Result<Option<Named<'_>>, Refusal> {
    let Some(PersistentVolumeClaimSpec { data_source, data_source_ref, .. }) = &claim.spec else {
        return Ok(None);
    };
    // The API server fills in the one from the other. `dataSourceRef` alone may name another namespace.
    let older = data_source.as_ref().map(|source| (source.api_group.as_deref(), &source.kind, &source.name));
    let newer =
        data_source_ref.as_ref().map(|source| (source.api_group.as_deref(), &source.kind, &source.name));
    let Some((group, kind, name)) = newer.or(older) else { return Ok(None) };
    let namespace = data_source_ref.as_ref().and_then(|source| source.namespace.as_ref());
    let ambiguous = older.zip(newer).is_some_and(|(older, newer)| older != newer);
    let local = namespace.is_none() || namespace == claim.metadata.namespace.as_ref();
    match (group.unwrap_or_default(), kind.as_str()) {
        ("", "PersistentVolumeClaim") if local && !ambiguous => Ok(Some(Named::Claim(name))),
        (snapshot::GROUP, snapshot::KIND) if local && !ambiguous => Ok(Some(Named::Snapshot(name))),
        _ => Err(Refusal::DataSource(format!("{kind} {name:?}"))),
    }
}

/// Decides whether a claim as it was found can be copied, and its volume if it has one.
///
/// # Errors
/// [`Refusal::Source`] says why not; [`Error::SourceElsewhere`].
fn origin(
    source: &PersistentVolumeClaim,
    volume: Option<&PersistentVolume>,
    identity: &Identity,
) -> Result<Origin, Error> {
    let refused = |why: &'static str| Refusal::Source { source_object: shown(&source.name_any()), why };
    if source.metadata.deletion_timestamp.is_some() {
        return Err(refused("is being deleted").into());
    }
    let phase = source.status.as_ref().and_then(|status| status.phase.as_deref());
    let bound = phase == Some("Bound") && ownership::bound_volume(source).is_some();
    let Some(volume) = volume.filter(|_| bound) else {
        return Err(refused("has no volume yet; it is copied once it has").into());
    };
    if !ownership::is_volume_of(volume, source) {
        return Err(refused("does not have the volume that it names").into());
    }
    if let Some(node) = ownership::other_node(volume, identity) {
        return Err(Error::SourceElsewhere {
            source_object: shown(&source.name_any()),
            node: node.to_owned(),
        });
    }
    if !ownership::is_our_volume(volume, identity) {
        return Err(refused("has a volume of another driver").into());
    }
    let spec = volume.spec.as_ref();
    Ok(Origin {
        id: OwnedContentSource::Volume(ownership::volume_id(volume, identity)?),
        mode: spec.and_then(|spec| spec.volume_mode.clone()).or_else(|| Some("Filesystem".to_owned())),
        capacity: recorded(spec.and_then(|spec| spec.capacity.as_ref())).unwrap_or_default(),
    })
}

fn shown(claim: &str) -> String {
    format!("claim {claim:?}")
}

/// Finds what the claim is to be filled with.
///
/// # Errors
/// When that cannot be copied here, or the API server does not tell.
pub(crate) async fn find(claim: &PersistentVolumeClaim, ctx: &Context) -> Result<Option<Origin>, Error> {
    let name = match named(claim)? {
        None => return Ok(None),
        Some(Named::Snapshot(name)) => return snapshot::find(claim, name, ctx).await.map(Some),
        Some(Named::Claim(name)) => name,
    };
    let claims = ctx.claim_api(&claim.namespace().unwrap_or_default());
    let source =
        absence::get_opt(&claims, name).await.map_err(|error| Error::api("read claim", name, error))?;
    let Some(source) = source else {
        return Err(Refusal::Source { source_object: shown(name), why: "does not exist" }.into());
    };
    let volume = match ownership::bound_volume(&source) {
        Some(volume) => {
            let object = absence::get_opt(&ctx.volume_api(), volume).await;
            object.map_err(|error| Error::api("read PersistentVolume", volume, error))?
        }
        None => None,
    };
    origin(&source, volume.as_deref(), &ctx.identity).map(Some)
}

#[cfg(test)]
mod tests {
    use loopfs::VolumeId;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures;

    fn local(name: &str) -> Value {
        json!({"kind": "PersistentVolumeClaim", "name": name})
    }

    #[rstest]
    #[case::nothing(json!({}), Ok(None))]
    #[case::older(json!({"dataSource": local("a")}), Ok(Some(Named::Claim("a"))))]
    #[case::newer(json!({"dataSourceRef": local("a")}), Ok(Some(Named::Claim("a"))))]
    #[case::both(json!({"dataSource": local("a"), "dataSourceRef": local("a")}), Ok(Some(Named::Claim("a"))))]
    #[case::empty_group(json!({"dataSource": {"apiGroup": "", "kind": "PersistentVolumeClaim", "name": "a"}}), Ok(Some(Named::Claim("a"))))]
    #[case::own_namespace(json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "a", "namespace": "shop"}}), Ok(Some(Named::Claim("a"))))]
    #[case::other_namespace(json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "a", "namespace": "bank"}}), Err("PersistentVolumeClaim \"a\""))]
    #[case::two(json!({"dataSource": local("a"), "dataSourceRef": local("b")}), Err("PersistentVolumeClaim \"b\""))]
    #[case::snapshot(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}}), Ok(Some(Named::Snapshot("s"))))]
    #[case::snapshot_of_another_namespace(json!({"dataSourceRef": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s", "namespace": "bank"}}), Err("VolumeSnapshot \"s\""))]
    #[case::content(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshotContent", "name": "s"}}), Err("VolumeSnapshotContent"))]
    #[case::foreign_group(json!({"dataSource": {"apiGroup": "x.dev", "kind": "PersistentVolumeClaim", "name": "a"}}), Err("\"a\""))]
    fn sources(#[case] spec: Value, #[case] expected: Result<Option<Named<'_>>, &str>) {
        let claim = fixtures::claim(json!({"spec": spec}));
        match (named(&claim), expected) {
            (Ok(name), Ok(expected)) => assert_eq!(name, expected),
            (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
            other => panic!("{other:?}"),
        }
    }

    #[rstest]
    #[case::fine(json!({}), json!({}), Ok(()))]
    #[case::going(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), json!({}), Err("is being deleted"))]
    #[case::unbound(json!({"spec": {"volumeName": null}}), json!({}), Err("no volume yet"))]
    #[case::lost(json!({"status": {"phase": "Lost"}}), json!({}), Err("no volume yet"))]
    #[case::of_an_earlier_claim(json!({}), json!({"spec": {"claimRef": {"uid": "earlier"}}}), Err("does not have the volume"))]
    #[case::elsewhere(json!({}), json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), Err("on node \"node-b\""))]
    #[case::other_driver(json!({}), json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), Err("another driver"))]
    #[case::path(json!({}), json!({"spec": {"csi": {"volumeHandle": "../x"}}}), Err("not a volume id"))]
    fn origins(#[case] source: Value, #[case] volume: Value, #[case] expected: Result<(), &str>) {
        let (source, volume) = (fixtures::bound_claim(source), fixtures::volume(volume));
        match (origin(&source, Some(&volume), &fixtures::identity()), expected) {
            (Ok(origin), Ok(())) => {
                let id = OwnedContentSource::Volume(VolumeId::parse(fixtures::VOLUME).unwrap());
                let mode = Some("Filesystem".to_owned());
                assert_eq!(origin, Origin { id, mode, capacity: Bytes(1 << 20) });
            }
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}
