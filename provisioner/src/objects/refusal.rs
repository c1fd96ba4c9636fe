//! Why a claim is refused.

use loopfs::{Bytes, MountOptionError};

use crate::objects::{parameters::ParametersError, quantity::QuantityError};

/// Why a claim gets no volume until it or its class is changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("storage class {0:?} does not exist")]
    ClassMissing(String),
    #[error("the claim names no storage class")]
    ClassUnnamed,
    #[error("storage class {class:?}: {source}")]
    Parameters { class: String, source: ParametersError },
    #[error("storage class {class:?}: mountOptions: {source}")]
    MountOptions { class: String, source: MountOptionError },
    #[error("storage class {class:?}: reclaimPolicy is {policy:?}; allowed: Delete, Retain")]
    ReclaimPolicy { class: String, policy: String },
    #[error(
        "access mode {0:?} is not supported: the volume is local to one node, and starts empty; allowed: ReadWriteOnce, \
         ReadWriteOncePod (to read only, mount the claim readOnly in the pod)"
    )]
    AccessMode(String),
    #[error("the claim has no access mode; allowed: ReadWriteOnce, ReadWriteOncePod")]
    NoAccessMode,
    #[error("volumeMode is {0:?}; allowed: Filesystem, Block")]
    VolumeMode(String),
    #[error("the claim asks for no size: set spec.resources.requests.storage")]
    NoSize,
    #[error("the claim asks for 0 bytes: set spec.resources.requests.storage to at least 1")]
    ZeroSize,
    #[error("spec.resources.requests.storage: {0}")]
    Size(#[from] QuantityError),
    #[error(
        "the claim wants to be filled from {0}, and an empty volume would not do; a data source can be a PersistentVolumeClaim \
         or a VolumeSnapshot of the same namespace"
    )]
    DataSource(String),
    #[error("{source_object}, which is to be copied, {why}")]
    Source { source_object: String, why: &'static str },
    #[error(
        "the claim is to be filled from one whose volumeMode is {0:?}, which therefore has to be its own"
    )]
    SourceMode(String),
    #[error(
        "the claim is to be filled from one of {of_source}, and asks for {asked}; ask for at least as much"
    )]
    SourceSize { of_source: Bytes, asked: Bytes },
    #[error(
        "spec.selector picks among volumes that exist; it cannot be combined with a class that makes new ones"
    )]
    Selector,
    #[error("spec.volumeAttributesClassName is {0:?}; volume attributes classes are not supported")]
    AttributesClass(String),
    #[error(
        "storage class {class:?}: its allowedTopologies do not allow node {node:?}, which was selected for the claim; change \
         them, or the labels of the node, or remove the claim's annotation volume.kubernetes.io/selected-node"
    )]
    Topology { class: String, node: String },
    #[error(
        "storage class {class:?} has volumeBindingMode Immediate, and {} provide the volume, which is local to its node; set \
         volumeBindingMode: WaitForFirstConsumer, or allowedTopologies that allow exactly one node of the driver",
        nodes_may(*nodes)
    )]
    Immediate { class: String, nodes: usize },
    #[error("the claim's UID {0:?} cannot name a volume")]
    Uid(String),
}

fn nodes_may(count: usize) -> String {
    if count == 0 { "no node may".to_owned() } else { format!("{count} nodes may") }
}
