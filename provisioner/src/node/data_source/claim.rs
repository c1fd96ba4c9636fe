//! A claim of the same namespace as the data source of a claim.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use loopfs::volume_store::OwnedContentSource;

use super::source::DataSource;
use crate::api::absence;
use crate::error::Error;
use crate::node::context::Context;
use crate::objects::claim_status::recorded;
use crate::objects::identity::Identity;
use crate::objects::ownership;
use crate::objects::refusal::Refusal;

/// Checks that a claim can be copied, given its PersistentVolume if it has one, and returns its volume.
fn resolve(
    source: &PersistentVolumeClaim,
    volume: Option<&PersistentVolume>,
    identity: &Identity,
) -> Result<DataSource, Error> {
    let refused = |why: &'static str| Refusal::Source { source_object: describe(&source.name_any()), why };
    if source.metadata.deletion_timestamp.is_some() {
        return Err(refused("is being deleted").into());
    }
    let phase = source.status.as_ref().and_then(|status| status.phase.as_deref());
    let bound = phase == Some("Bound") && ownership::bound_volume(source).is_some();
    let Some(volume) = volume.filter(|_| bound) else {
        return Err(refused("has no volume yet; it is copied once it has one").into());
    };
    if !ownership::is_volume_of(volume, source) {
        return Err(refused("does not have the volume that it names").into());
    }
    if let Some(node) = ownership::other_node(volume, identity) {
        return Err(Error::SourceElsewhere {
            source_object: describe(&source.name_any()),
            node: node.to_owned(),
        });
    }
    if !ownership::is_our_volume(volume, identity) {
        return Err(refused("has a volume of another driver").into());
    }
    let spec = volume.spec.as_ref();
    Ok(DataSource {
        id: OwnedContentSource::Volume(ownership::volume_id(volume, identity)?),
        mode: spec.and_then(|spec| spec.volume_mode.clone()).or_else(|| Some("Filesystem".to_owned())),
        capacity: recorded(spec.and_then(|spec| spec.capacity.as_ref())).unwrap_or_default(),
    })
}

fn describe(claim: &str) -> String {
    format!("claim {claim:?}")
}

/// Finds the volume of the claim with this name, which is the data source of `requester` and in the same namespace.
pub(crate) async fn find_volume(
    name: &str,
    requester: &PersistentVolumeClaim,
    ctx: &Context,
) -> Result<DataSource, Error> {
    let claims = ctx.cluster.claim_api(&requester.namespace().unwrap_or_default());
    let source =
        absence::get_opt(&claims, name).await.map_err(|error| Error::api("read claim", name, error))?;
    let Some(source) = source else {
        return Err(Refusal::Source { source_object: describe(name), why: "does not exist" }.into());
    };
    let volume = match ownership::bound_volume(&source) {
        Some(volume) => ctx.cluster.read_volume(volume).await?,
        None => None,
    };
    resolve(&source, volume.as_ref(), &ctx.cluster.identity)
}

#[cfg(test)]
mod tests {
    use loopfs::Bytes;
    use loopfs::volume_store::VolumeId;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    #[rstest]
    #[case::fine(json!({}), json!({}), Ok(()))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), json!({}), Err("is being deleted"))]
    #[case::unbound(json!({"spec": {"volumeName": null}}), json!({}), Err("no volume yet"))]
    #[case::lost(json!({"status": {"phase": "Lost"}}), json!({}), Err("no volume yet"))]
    #[case::of_an_earlier_claim(json!({}), json!({"spec": {"claimRef": {"uid": "earlier"}}}), Err("does not have the volume"))]
    #[case::elsewhere(json!({}), json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}), Err("on node \"node-b\""))]
    #[case::other_driver(json!({}), json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), Err("another driver"))]
    #[case::path(json!({}), json!({"spec": {"csi": {"volumeHandle": "../x"}}}), Err("not a volume id"))]
    fn source_claim_needs_a_local_volume(
        #[case] source: Value,
        #[case] volume: Value,
        #[case] expected: Result<(), &str>,
    ) {
        let (source, volume) = (fixtures::bound_claim(source), fixtures::volume(volume));
        match (resolve(&source, Some(&volume), &fixtures::identity()), expected) {
            (Ok(data_source), Ok(())) => {
                let id = OwnedContentSource::Volume(VolumeId::parse(fixtures::VOLUME).unwrap());
                let mode = Some("Filesystem".to_owned());
                assert_eq!(data_source, DataSource { id, mode, capacity: Bytes(1 << 20) });
            }
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}
