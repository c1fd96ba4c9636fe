//! Reasons to refuse a claim.

use csi_wire::SettingsError;
use loopfs::Bytes;
use loopfs::mount::MountOptionError;

use crate::objects::quantity::QuantityError;

/// The reason why a claim gets no volume until the claim or its class is changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("storage class {0:?} does not exist")]
    ClassMissing(String),
    #[error("the claim names no storage class")]
    ClassUnnamed,
    #[error("storage class {class:?}: {source}")]
    Parameters { class: String, source: SettingsError },
    #[error("storage class {class:?}: mountOptions: {source}")]
    MountOptions { class: String, source: MountOptionError },
    #[error("storage class {class:?}: reclaimPolicy is {policy:?}; allowed: Delete, Retain")]
    ReclaimPolicy { class: String, policy: String },
    #[error(
        "access mode {0:?} is not supported, because the volume is local to one node and starts empty; allowed: ReadWriteOnce, \
         ReadWriteOncePod (for read-only access, mount the claim readOnly in the pod)"
    )]
    AccessMode(String),
    #[error("the claim has no access mode; allowed: ReadWriteOnce, ReadWriteOncePod")]
    NoAccessMode,
    #[error("volumeMode is {0:?}; allowed: Filesystem, Block")]
    VolumeMode(String),
    #[error("the claim requests no size; set spec.resources.requests.storage")]
    NoSize,
    #[error("the claim requests 0 bytes; set spec.resources.requests.storage to at least 1")]
    ZeroSize,
    #[error("spec.resources.requests.storage: {0}")]
    Size(#[from] QuantityError),
    #[error(
        "the claim's data source {0} is not in the namespace of the claim, or dataSource and dataSourceRef differ, so no volume was \
         created; name a PersistentVolumeClaim or a VolumeSnapshot of the same namespace"
    )]
    DataSource(String),
    #[error("the claim's data source, {source_object}, {why}")]
    Source { source_object: String, why: &'static str },
    #[error(
        "the claim's data source, VolumeSnapshot {snapshot:?}, is not ready, and no csi-snapshotter handles it: its \
         VolumeSnapshotContent {content:?} lacks the label snapshot.storage.kubernetes.io/managed-by with the name of the \
         snapshot's node; set the label, and start snapshot-controller with --enable-distributed-snapshotting, so that it sets \
         the label of further snapshots"
    )]
    SnapshotUnmanaged { snapshot: String, content: String },
    #[error(
        "the claim's volumeMode differs from that of its data source; the data source's volumeMode is {0:?}"
    )]
    SourceMode(String),
    #[error("the claim requests {requested}, but its data source has {of_source}; request at least as much")]
    SourceSize { of_source: Bytes, requested: Bytes },
    #[error(
        "spec.selector selects existing volumes; it cannot be combined with a class that creates volumes"
    )]
    Selector,
    #[error("spec.volumeAttributesClassName is {0:?}; volume attributes classes are not supported")]
    AttributesClass(String),
    #[error(
        "storage class {class:?}: its allowedTopologies do not allow node {node:?}, which was selected for the claim; if the volume \
         has to be there, change the allowedTopologies or the labels of the node"
    )]
    Topology { class: String, node: String },
    #[error(
        "storage class {class:?} has volumeBindingMode Immediate, and {} provide a volume, because volumes are local to one node; set \
         volumeBindingMode: WaitForFirstConsumer, or allowedTopologies that allow exactly one node of the driver",
        nodes_may(*nodes)
    )]
    Immediate { class: String, nodes: usize },
    #[error("the claim's UID {0:?} cannot name a volume")]
    Uid(String),
}

/// Returns the words before "provide a volume": how many nodes may do so.
fn nodes_may(count: usize) -> String {
    if count == 0 { "no node may".to_owned() } else { format!("{count} nodes may") }
}
