//! The claim that a volume is created for, in the annotations of the volume.
//!
//! Between the creation of a volume and that of its PersistentVolume, only the node knows that they belong together, so the volume is
//! pending until then. If no PersistentVolume names a pending volume, a crash left the volume behind, or the claim was deleted in the
//! meantime, and the volume can be removed. A volume that is not pending is never removed for that reason: a user may have deleted its
//! PersistentVolume, or the store may belong to another cluster.

use csi_wire::reserved::CLAIM_ANNOTATION as CLAIM;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use loopfs::volume_store::{Annotations, VolumeId};

use crate::objects::ownership;

const UID: &str = "uid";
const CLASS: &str = "class";

/// The claim for which a volume is created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimRecord {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) class: String,
}

impl ClaimRecord {
    pub(crate) fn of(claim: &PersistentVolumeClaim) -> Self {
        let class = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.clone());
        ClaimRecord {
            namespace: claim.namespace().unwrap_or_default(),
            name: claim.name_any(),
            uid: claim.uid().unwrap_or_default(),
            class: class.unwrap_or_default(),
        }
    }

    /// Returns the key of the claim in the cache. The caller must compare the UID as well.
    pub(crate) fn claim(&self) -> ObjectRef<PersistentVolumeClaim> {
        ObjectRef::new(&self.name).within(&self.namespace)
    }

    pub(crate) fn annotations(&self) -> loopfs::Result<Annotations> {
        let claim = format!("{}/{}", self.namespace, self.name);
        Annotations::new([(CLAIM, &claim), (UID, &self.uid), (CLASS, &self.class)])
    }

    /// Returns the claim of a volume, unless another program created it: a copy of the directory of a volume has its annotations, and
    /// another id.
    pub(crate) fn of_volume(id: &VolumeId, annotations: &Annotations) -> Option<Self> {
        let is_of = |record: &Self| ownership::volume_id_of(&record.uid).as_ref() == Ok(id);
        Self::parse(annotations).filter(is_of)
    }

    /// Returns `None` if the provisioner did not write them.
    pub(crate) fn parse(annotations: &Annotations) -> Option<Self> {
        let (namespace, name) = annotations.get(CLAIM)?.split_once('/')?;
        let [uid, class] = [UID, CLASS].map(|key| annotations.get(key).map(str::to_owned));
        Some(ClaimRecord { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid?, class: class? })
    }
}

#[cfg(test)]
mod tests {
    use loopfs::ErrorKind;

    use super::*;

    fn record(name_length: usize) -> ClaimRecord {
        ClaimRecord {
            namespace: "n".repeat(63),
            name: "c".repeat(name_length),
            uid: "0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11".to_owned(),
            class: "s".repeat(253),
        }
    }

    #[test]
    fn the_longest_record_reads_back() {
        let record = record(253);
        assert_eq!(ClaimRecord::parse(&record.annotations().unwrap()), Some(record));
    }

    #[test]
    fn too_long_names_are_an_error() {
        assert_eq!(record(1000).annotations().unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn copy_of_another_id_has_none() {
        let annotations = record(1).annotations().unwrap();
        let id = |text: &str| VolumeId::parse(text).unwrap();
        let own = format!("pvc-{}", record(1).uid);
        assert_eq!(ClaimRecord::of_volume(&id(&own), &annotations), Some(record(1)));
        assert_eq!(ClaimRecord::of_volume(&id("pvc-copy"), &annotations), None);
    }

    #[test]
    fn annotations_of_others_are_no_record() {
        for fields in [vec![], vec![(CLAIM, "shop/data")], vec![(CLAIM, "data"), (UID, "u"), (CLASS, "c")]] {
            assert_eq!(ClaimRecord::parse(&Annotations::new(fields).unwrap()), None);
        }
    }
}
