//! Creates the volume of a claim and its PersistentVolume.
//!
//! The volume's id is derived from the claim's UID, and every step can be repeated. Whatever a crash interrupts, the next attempt
//! ends with one volume and one PersistentVolume.
//!
//! A volume of that id may hold data already: if the API server was restored from a backup, a claim that was provisioned long ago can be
//! pending again. The claim gets its data back, with an event that says so, and only the reclaim policy can delete the data.

use std::collections::BTreeMap;
use std::time::Duration;

use csi_wire::volumes::CreateResponse;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::PostParams;
use kube::runtime::reflector::ObjectRef;
use loopfs::Bytes;
use loopfs::mount::MountFlags;
use loopfs::volume_store::{OwnedContentSource, VolumeId, VolumeKind};
use tokio::time::interval;

use crate::api::events::Reason;
use crate::error::Error;
use crate::node::context::Context;
use crate::node::data_source::DataSource;
use crate::node::volume_deletion;
use crate::objects::identity::Identity;
use crate::objects::loss_policy::Policy;
use crate::objects::parameters::Parameters;
use crate::objects::pv::{self, Description, ReclaimPolicy};
use crate::objects::refusal::Refusal;
use crate::objects::{claim_status, ownership};
use crate::store::claim_record::ClaimRecord;
use crate::store::driver::{NewVolume, StorageError};

/// Interval at which a copy checks whether its claim still waits for it.
const WANTED_INTERVAL: Duration = Duration::from_secs(1);

/// The volume to create.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Creation {
    pub(crate) id: VolumeId,
    pub(crate) kind: VolumeKind,
    pub(crate) capacity: Bytes,
    /// The settings of the volume in the parameters of the class.
    pub(crate) settings: BTreeMap<String, String>,
    pub(crate) reclaim_policy: ReclaimPolicy,
    pub(crate) mount_options: Option<Vec<String>>,
    /// The volume or snapshot to copy.
    pub(crate) source: Option<OwnedContentSource>,
    pub(crate) node_loss: Policy,
}

/// Returns the volume to create for a claim of this node. `None` if the claim has its PersistentVolume, which kube-controller-manager binds,
/// or belongs to another driver.
///
/// # Errors
/// [`Refusal`] if the claim belongs to this node but cannot be served as it is; [`Error::VolumeDeleting`]; [`Error::NameTaken`].
pub(crate) fn plan(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    existing: Option<&PersistentVolume>,
    data_source: Option<DataSource>,
    identity: &Identity,
) -> Result<Option<Creation>, Error> {
    if !ownership::is_claim_to_provision(claim, identity) {
        return Ok(None);
    }
    let id = ownership::volume_id_for(claim)?;
    match existing {
        // kube-controller-manager does not bind it.
        Some(volume)
            if ownership::is_volume_of(volume, claim) && volume.metadata.deletion_timestamp.is_some() =>
        {
            return Err(Error::VolumeDeleting(id.to_string()));
        }
        Some(volume) if ownership::is_volume_of(volume, claim) => return Ok(None),
        Some(_) => return Err(Error::NameTaken(id.to_string())),
        None => {}
    }
    let spec = claim.spec.clone().unwrap_or_default();
    let class_name =
        spec.storage_class_name.clone().filter(|name| !name.is_empty()).ok_or(Refusal::ClassUnnamed)?;
    let class = class.ok_or_else(|| Refusal::ClassMissing(class_name.clone()))?;
    if class.provisioner != identity.driver() {
        return Ok(None);
    }
    let parameters = Parameters::parse(class.parameters.as_ref())
        .map_err(|source| Refusal::Parameters { class: class_name.clone(), source })?;
    let reclaim_policy = reclaim_policy(class, &class_name)?;
    let kind = check_spec(&spec)?;
    check_mount_options(class, &class_name, kind)?;
    let requested = match claim_status::requested(claim).map_err(Refusal::Size)? {
        None => return Err(Refusal::NoSize.into()),
        Some(Bytes(0)) => return Err(Refusal::ZeroSize.into()),
        Some(requested) => requested,
    };
    if let Some(data_source) = &data_source {
        if let Some(mode) = data_source.mode.as_ref().filter(|mode| **mode != kind.to_string()) {
            return Err(Refusal::SourceMode(mode.clone()).into());
        }
        // The source has the size that was requested for it, as the store rounds it. A copy gets the same size for the same request.
        if requested.round_up().unwrap_or(requested) < data_source.capacity {
            return Err(Refusal::SourceSize { of_source: data_source.capacity, requested }.into());
        }
    }
    Ok(Some(Creation {
        id,
        kind,
        capacity: requested,
        settings: parameters.settings.pairs().clone(),
        reclaim_policy,
        mount_options: class.mount_options.clone(),
        source: data_source.map(|data_source| data_source.id),
        node_loss: parameters.node_loss,
    }))
}

fn reclaim_policy(class: &StorageClass, name: &str) -> Result<ReclaimPolicy, Refusal> {
    match class.reclaim_policy.as_deref() {
        None | Some("Delete") => Ok(ReclaimPolicy::Delete),
        Some("Retain") => Ok(ReclaimPolicy::Retain),
        Some(policy) => Err(Refusal::ReclaimPolicy { class: name.to_owned(), policy: policy.to_owned() }),
    }
}

/// Checks the mount options now. The kubelet passes them to the driver, which would otherwise reject them in every pod.
fn check_mount_options(class: &StorageClass, name: &str, kind: VolumeKind) -> Result<(), Refusal> {
    match (kind, &class.mount_options) {
        (VolumeKind::Filesystem, Some(options)) => MountFlags::from_options(options)
            .map(drop)
            .map_err(|source| Refusal::MountOptions { class: name.to_owned(), source }),
        // A device is not mounted.
        (VolumeKind::Block, _) | (_, None) => Ok(()),
    }
}

/// Checks the fields of the claim that do not depend on the class.
fn check_spec(spec: &PersistentVolumeClaimSpec) -> Result<VolumeKind, Refusal> {
    if spec.selector.is_some() {
        return Err(Refusal::Selector);
    }
    if let Some(name) = spec.volume_attributes_class_name.as_ref().filter(|name| !name.is_empty()) {
        return Err(Refusal::AttributesClass(name.clone()));
    }
    let modes = spec.access_modes.as_deref().unwrap_or_default();
    if modes.is_empty() {
        return Err(Refusal::NoAccessMode);
    }
    if let Some(mode) =
        modes.iter().find(|mode| !["ReadWriteOnce", "ReadWriteOncePod"].contains(&mode.as_str()))
    {
        return Err(Refusal::AccessMode(mode.clone()));
    }
    spec.volume_mode.as_deref().map_or(Ok(VolumeKind::Filesystem), |mode| {
        pv::kind_of_mode(mode).ok_or_else(|| Refusal::VolumeMode(mode.to_owned()))
    })
}

/// Creates the volume and its PersistentVolume.
pub(crate) async fn apply(
    claim: &PersistentVolumeClaim,
    creation: Creation,
    ctx: &Context,
) -> Result<(), Error> {
    // The cleanup may be deleting the volume of an earlier attempt, if the claim was rescheduled to another node and back.
    let Some(_exclusive) = ctx.in_flight.enter(&creation.id) else {
        return Err(Error::InFlight(creation.id));
    };
    // The plan was made before the volume was locked. A PersistentVolume that was created since then changes the plan.
    if ctx.volume(creation.id.as_str()).is_some() {
        return Err(Error::InFlight(creation.id));
    }
    let claim_name = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
    let note = format!(
        "creating volume {} for claim {claim_name:?} on node {}",
        creation.id,
        ctx.cluster.identity.node()
    );
    ctx.cluster.events.publish(claim, Reason::Provisioning, note);

    // A volume that is being copied is not deleted in the meantime, however long it takes.
    let _source = match &creation.source {
        Some(OwnedContentSource::Volume(source)) => {
            Some(ctx.in_flight.copy(source).ok_or_else(|| Error::InFlight(source.clone()))?)
        }
        // If the snapshot is deleted over CSI in the meantime, the driver notices and creates no volume.
        Some(OwnedContentSource::Snapshot(_)) | None => None,
    };
    let record = ClaimRecord::of(claim);
    let CreateResponse { capacity, filesystem_uuid, held_data } =
        create_volume(claim, &creation, &record, ctx).await?;
    let capacity = Bytes(capacity);
    let Creation { id, kind, reclaim_policy, mount_options, node_loss, .. } = creation;
    let description = Description {
        claim,
        id: &id,
        kind,
        capacity,
        filesystem_uuid: filesystem_uuid.clone(),
        reclaim_policy,
        mount_options,
        node_loss,
    };
    let object = pv::build(description, &ctx.cluster.identity);
    match create_pv(claim, object, &filesystem_uuid, ctx).await? {
        PvOutcome::Created if held_data => {
            let note = format!(
                "volume {id} on node {} already contained data; the claim gets the volume with this data, to which its reclaim policy \
                 applies; if the claim is not the owner of the data, set the policy to Retain and copy the data",
                ctx.cluster.identity.node()
            );
            ctx.cluster.events.publish(claim, Reason::ExistingDataFound, note);
        }
        PvOutcome::Created | PvOutcome::Exists => {}
        PvOutcome::Elsewhere if held_data => {
            tracing::warn!(volume = %id, claim = claim_name, "kept a volume of this node, because it held data before; another node created one for the same claim");
            return Ok(());
        }
        PvOutcome::Elsewhere => {
            // The claim was rescheduled in the meantime.
            let (owner, why) = (volume_deletion::owner_from(&record), volume_deletion::ON_ANOTHER_NODE);
            return volume_deletion::delete(&id, Some(&filesystem_uuid), owner, why, ctx).await.map(drop);
        }
    }
    let confirming = async { ctx.storage.driver()?.confirm(&id, &filesystem_uuid).await };
    if let Err(error) = confirming.await {
        tracing::warn!(volume = %id, %error, "could not confirm a volume; the cleanup of orphaned volumes retries");
    }
    let note = format!("successfully provisioned volume {id}: {kind}, {capacity}");
    ctx.cluster.events.publish(claim, Reason::ProvisioningSucceeded, note);
    Ok(())
}

/// Creates the volume, empty or as a copy. A copy takes minutes, and a claim that is deleted or rescheduled in the meantime leaves its
/// slot to others.
async fn create_volume(
    claim: &PersistentVolumeClaim,
    creation: &Creation,
    record: &ClaimRecord,
    ctx: &Context,
) -> Result<CreateResponse, Error> {
    let volume = NewVolume {
        id: creation.id.clone(),
        kind: creation.kind,
        capacity: creation.capacity,
        settings: creation.settings.clone(),
        annotations: record.annotations().map_err(StorageError::from)?,
        source: creation.source.clone(),
    };
    let creating = ctx.storage.driver()?.create(volume);
    if creation.source.is_none() {
        return Ok(creating.await?);
    }
    let key = ObjectRef::from_obj(claim);
    let is_wanted = || {
        ctx.claims.cache.get(&key).is_some_and(|known| {
            known.uid() == claim.uid()
                && ownership::is_claim_to_provision(&known, &ctx.cluster.identity)
                && ownership::selected_node(&known) == Some(ctx.cluster.identity.node())
        })
    };
    let ended = async {
        let mut checks = interval(WANTED_INTERVAL);
        while is_wanted() {
            checks.tick().await;
        }
    };
    tokio::select! {
        biased;
        created = creating => match created {
            Err(_) if !is_wanted() => Err(Error::CopyEnded(creation.id.clone())),
            created => Ok(created?),
        },
        // The dropped call ends the copy.
        () = ended => Err(Error::CopyEnded(creation.id.clone())),
    }
}

/// Whether the claim has a PersistentVolume now.
enum PvOutcome {
    Created,
    /// It existed before.
    Exists,
    /// The existing one is on another node.
    Elsewhere,
}

/// Creates the PersistentVolume, unless one of this claim exists.
async fn create_pv(
    claim: &PersistentVolumeClaim,
    object: PersistentVolume,
    filesystem_uuid: &str,
    ctx: &Context,
) -> Result<PvOutcome, Error> {
    let (name, identity) = (object.name_any(), &ctx.cluster.identity);
    match ctx.cluster.volume_api().create(&PostParams::default(), &object.into()).await {
        Ok(created) => {
            ctx.volumes.writes.remember(created.into_inner());
            Ok(PvOutcome::Created)
        }
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            // An earlier attempt created it and the response was lost, or the cache lags behind.
            let existing = ctx.cluster.volume_api().get(&name).await;
            let existing = existing.map_err(|error| Error::api("read PersistentVolume", &name, error))?;
            match ownership::is_volume_of(&existing, claim) {
                true if ownership::is_data_elsewhere(&existing, filesystem_uuid, identity) => {
                    Ok(PvOutcome::Elsewhere)
                }
                // Its data may have been deleted before this attempt created the volume again. The volume stays pending, so that it does
                // not outlive the claim.
                true if existing.metadata.deletion_timestamp.is_some() => Err(Error::VolumeDeleting(name)),
                true => {
                    ctx.volumes.writes.remember(existing.into_inner());
                    Ok(PvOutcome::Exists)
                }
                false => Err(Error::NameTaken(name)),
            }
        }
        Err(error) => Err(Error::api("create PersistentVolume", name, error)),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::objects::loss_policy::OnNodeLoss;
    use crate::testing::fixtures;

    fn planned(claim: Value, class: Value) -> Result<Option<Creation>, String> {
        let (claim, class) = (fixtures::claim(claim), fixtures::class(class));
        plan(&claim, Some(&class), None, None, &fixtures::identity()).map_err(|error| error.to_string())
    }

    fn creation(claim: Value, class: Value) -> Creation {
        planned(claim, class).unwrap().expect("a volume is created")
    }

    #[test]
    fn plain_claim_gets_class_defaults() {
        let expected = Creation {
            id: VolumeId::parse(fixtures::VOLUME).unwrap(),
            kind: VolumeKind::Filesystem,
            capacity: Bytes(1 << 20),
            settings: BTreeMap::new(),
            reclaim_policy: ReclaimPolicy::Delete,
            mount_options: Some(vec!["nosuid".to_owned(), "nodev".to_owned()]),
            source: None,
            node_loss: Policy::default(),
        };
        assert_eq!(creation(json!({}), json!({})), expected);
    }

    #[test]
    fn class_sets_the_node_loss_policy() {
        let class = json!({"parameters": {"onNodeLoss": "deleteClaim", "nodeLossGraceSeconds": "60"}});
        let expected = Policy { on_node_loss: OnNodeLoss::DeleteClaim, grace: Duration::from_secs(60) };
        assert_eq!(creation(json!({}), class).node_loss, expected);
    }

    #[rstest]
    #[case::block(json!({"spec": {"volumeMode": "Block"}}), VolumeKind::Block)]
    #[case::filesystem_by_default(json!({"spec": {"volumeMode": null}}), VolumeKind::Filesystem)]
    #[case::once_per_pod(json!({"spec": {"accessModes": ["ReadWriteOncePod"]}}), VolumeKind::Filesystem)]
    fn the_volume_mode_determines_the_kind(#[case] claim: Value, #[case] expected: VolumeKind) {
        assert_eq!(creation(claim, json!({})).kind, expected);
    }

    #[test]
    fn class_sets_inodes_and_reclaim_policy() {
        let made =
            creation(json!({}), json!({"parameters": {"bytesPerInode": "8192"}, "reclaimPolicy": "Retain"}));
        assert_eq!(made.settings, [("bytesPerInode".to_owned(), "8192".to_owned())].into());
        assert_eq!(made.reclaim_policy, ReclaimPolicy::Retain);
        let default = creation(json!({}), json!({"reclaimPolicy": null, "mountOptions": null}));
        assert_eq!(default.reclaim_policy, ReclaimPolicy::Delete);
        assert_eq!(default.mount_options, None);
    }

    #[rstest]
    #[case::unknown_parameter(json!({}), json!({"parameters": {"fstype": "ext4"}}), "unknown parameter \"fstype\"; allowed: ")]
    #[case::mount_option(json!({}), json!({"mountOptions": ["discard"]}), "mountOptions: an option is none of: ro, rw, nosuid")]
    #[case::mount_options(json!({}), json!({"mountOptions": ["nodev", "dev"]}), "nodev and dev contradict each other")]
    #[case::recycle(json!({}), json!({"reclaimPolicy": "Recycle"}), "allowed: Delete, Retain")]
    #[case::many_readers(json!({"spec": {"accessModes": ["ReadWriteOnce", "ReadOnlyMany"]}}), json!({}), "access mode \"ReadOnlyMany\" is not supported")]
    #[case::many_writers(json!({"spec": {"accessModes": ["ReadWriteMany"]}}), json!({}), "allowed: ReadWriteOnce, ReadWriteOncePod")]
    #[case::no_access_mode(json!({"spec": {"accessModes": []}}), json!({}), "no access mode")]
    #[case::zero(json!({"spec": {"resources": {"requests": {"storage": "0"}}}}), json!({}), "0 bytes")]
    #[case::no_size(json!({"spec": {"resources": null}}), json!({}), "requests no size")]
    #[case::negative(json!({"spec": {"resources": {"requests": {"storage": "-1Gi"}}}}), json!({}), "below zero")]
    #[case::absurd(json!({"spec": {"resources": {"requests": {"storage": "9E"}}}}), json!({}), "created")]
    #[case::too_large(json!({"spec": {"resources": {"requests": {"storage": "99E"}}}}), json!({}), "more than 8Ei")]
    #[case::malformed(json!({"spec": {"resources": {"requests": {"storage": "1MB"}}}}), json!({}), "not a quantity")]
    #[case::mode(json!({"spec": {"volumeMode": "Tape"}}), json!({}), "allowed: Filesystem, Block")]
    #[case::selector(json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}}), json!({}), "spec.selector")]
    #[case::attributes_class(json!({"spec": {"volumeAttributesClassName": "gold"}}), json!({}), "\"gold\"")]
    #[case::no_class(json!({"spec": {"storageClassName": null}}), json!({}), "names no storage class")]
    #[case::uid(json!({"metadata": {"uid": "../../etc"}}), json!({}), "cannot name a volume")]
    #[case::no_uid(json!({"metadata": {"uid": null}}), json!({}), "cannot name a volume")]
    fn refusals_say_what_is_allowed(#[case] claim: Value, #[case] class: Value, #[case] expected: &str) {
        match planned(claim, class) {
            Err(error) => assert!(error.contains(expected), "{error}"),
            // 9E is less than 8Ei, so the size is valid. The store refuses it if it has less space.
            Ok(planned) => assert_eq!((planned.is_some(), expected), (true, "created")),
        }
    }

    #[test]
    fn block_mount_options_are_not_checked() {
        let block = creation(json!({"spec": {"volumeMode": "Block"}}), json!({"mountOptions": ["discard"]}));
        assert_eq!(block.kind, VolumeKind::Block);
    }

    #[test]
    fn missing_class_error_names_it() {
        let error = plan(&fixtures::claim(json!({})), None, None, None, &fixtures::identity()).unwrap_err();
        assert_eq!(error.to_string(), "storage class \"loopfs\" does not exist");
        assert_eq!(error.reason(), "Refused");
    }

    #[test]
    fn other_drivers_claims_are_ignored() {
        assert_eq!(planned(json!({}), json!({"provisioner": "csi.other.dev"})), Ok(None));
    }

    #[rstest]
    #[case::as_large("1Mi", "Filesystem", Ok(()))]
    #[case::larger("2Mi", "Filesystem", Ok(()))]
    #[case::rounded_to_its_size("1044481", "Filesystem", Ok(()))]
    #[case::smaller("1044480", "Filesystem", Err("request at least as much"))]
    #[case::of_the_other_mode("1Mi", "Block", Err("volumeMode is \"Block\""))]
    fn copies(#[case] size: &str, #[case] mode: &str, #[case] expected: Result<(), &str>) {
        let claim = fixtures::claim(json!({"spec": {"resources": {"requests": {"storage": size}}}}));
        let id = OwnedContentSource::Volume(VolumeId::parse("pvc-source").unwrap());
        let data_source =
            DataSource { id: id.clone(), mode: Some(mode.to_owned()), capacity: Bytes(1 << 20) };
        let class = fixtures::class(json!({}));
        let planned = plan(&claim, Some(&class), None, Some(data_source), &fixtures::identity());
        match (planned, expected) {
            (Ok(Some(creation)), Ok(())) => assert_eq!(creation.source, Some(id)),
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            other => panic!("{other:?}"),
        }
    }

    #[rstest]
    #[case::ours(json!({}), Ok(None))]
    #[case::ours_being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), Err("VolumeDeleting"))]
    #[case::of_an_earlier_claim(json!({"spec": {"claimRef": {"uid": "earlier"}}}), Err("NameTaken"))]
    #[case::unclaimed(json!({"spec": {"claimRef": null}}), Err("NameTaken"))]
    fn existing_persistent_volume_must_match_claim(
        #[case] volume: Value,
        #[case] expected: Result<Option<Creation>, &str>,
    ) {
        let (claim, class, volume) =
            (fixtures::claim(json!({})), fixtures::class(json!({})), fixtures::volume(volume));
        let planned = plan(&claim, Some(&class), Some(&volume), None, &fixtures::identity());
        assert_eq!(planned.map_err(|error| error.reason()), expected);
    }
}
