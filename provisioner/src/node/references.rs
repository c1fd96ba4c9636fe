//! References to a volume: the `PersistentVolumes` whose handle is its id.
//!
//! An administrator can create a second one with the handle of a first, for instance to bind the data in another namespace.
//! The data of a volume is therefore deleted only if no other PersistentVolume needs it.

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt;
use loopfs::volume_store::VolumeId;

use crate::error::Error;
use crate::node::context::Context;
use crate::objects::{ownership, pv};

/// How the PersistentVolumes that are labelled with this node are found. The watch may have been silent for minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Labelled {
    /// In the cache: an event of the watch has just caused the deletion, so the cache is recent. A list for each deletion would make the
    /// deletion of all volumes of the node quadratic.
    Cached,
    /// In the cache, and by a list of the API server.
    Listed,
}

/// Checks that no PersistentVolume but `deleted`, if given, needs the data of a volume.
///
/// It checks the PersistentVolumes that are labelled with this node, and those without the label, as a person creates them. A
/// PersistentVolume with the label of another node has its data there.
///
/// # Errors
/// [`Error::StillReferenced`], or when a request to the API server fails.
pub(crate) async fn require_none(
    id: &VolumeId,
    deleted: Option<&PersistentVolume>,
    labelled: Labelled,
    ctx: &Context,
) -> Result<(), Error> {
    let needs = |volume: &PersistentVolume| {
        deleted.is_none_or(|deleted| deleted.metadata.name != volume.metadata.name)
            && ownership::volume_id(volume, &ctx.cluster.identity).is_ok_and(|of| of == *id)
            && !pv::is_discarded(volume)
    };
    let refused =
        |volume: &PersistentVolume| Error::StillReferenced { id: id.clone(), by: volume.name_any() };
    if let Some(volume) = ctx.volumes.cache.state().iter().find(|volume| needs(volume)) {
        return Err(refused(volume));
    }
    let label = ctx.cluster.identity.node_label();
    let unlabelled = format!("!{label}");
    let of_node = (labelled == Labelled::Listed).then(|| format!("{label}={}", ctx.cluster.identity.node()));
    for selector in [unlabelled].into_iter().chain(of_node) {
        if let Some(volume) = ctx.cluster.list_volumes(&selector, needs).await?.first() {
            return Err(refused(volume));
        }
    }
    Ok(())
}
