//! The properties in which the nodes of a cluster can differ from the default ones.

use testvm::images::node::RootImage;

/// A variant of the nodes of a cluster. All nodes of a cluster have the same. The default is a stock Kubernetes
/// node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeVariant {
    /// The build of the kubelet.
    pub kubelet: Kubelet,
    /// The root file system.
    pub root: RootImage,
    /// The disk of the kubelet's directory.
    pub kubelet_root: KubeletRoot,
    /// The name of the kernel in the catalogue, if it is not the default one.
    pub kernel: Option<String>,
    /// The program that runs containers.
    pub runtime: ContainerRuntime,
}

/// A build of the kubelet.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Kubelet {
    /// The sources of the pinned module.
    #[default]
    Stock,
    /// The same sources, with the changes of `kubernetes/overlay` of the definitions. Its version ends in
    /// [`PATCHED_SUFFIX`].
    Patched,
}

/// The program that runs containers whose pods name no RuntimeClass.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ContainerRuntime {
    /// runc, as on most nodes.
    #[default]
    Runc,
    /// crun. On an emulated processor, `kubectl exec` takes a third of the time.
    Crun,
}

/// The disk of the kubelet's directory, [`KUBELET_ROOT`](super::KUBELET_ROOT).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum KubeletRoot {
    /// The disk of the root file system.
    #[default]
    RootDisk,
    /// The data disk: its directory [`KUBELET_DIRECTORY`](super::KUBELET_DIRECTORY). The kubelet measures volumes by
    /// project quotas there, where it can.
    DataDisk,
}

/// The end of the version that a patched kubelet reports: build metadata, which no comparison of versions reads.
pub const PATCHED_SUFFIX: &str = "+loopfs";
