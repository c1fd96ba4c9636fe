//! A Kubernetes control plane on the host and its nodes in virtual machines.
//!
//! The control plane is a set of processes on the host's loopback. A node is a virtual machine with
//! containerd, kubelet and kube-proxy, and a disk for data. [`NodePlan`] has what the
//! caller adds: container images, programs, and the mount of that disk. [`Cluster::boot_node`] adds a node.

pub(crate) mod api_error;
pub(crate) mod background;
mod components;
mod control_plane;
pub(crate) mod exec;
mod images;
mod kubeconfig;
mod layout;
mod loopback;
mod node;
mod node_spec;
mod parts;
pub(crate) mod pki;
mod plan;
mod pod_token;
mod programs;
mod running;
mod spec;
pub(crate) mod waiting;

pub use self::components::{ClusterProfile, Durability};
pub(crate) use self::control_plane::ControlPlane;
pub use self::node::Node;
pub use self::node_spec::DataDisk;
pub(crate) use self::node_spec::{TOOLS_DIR, USER_NAMESPACES_HANDLER};
pub use self::parts::Parts;
pub use self::plan::{ContainerImage, DataMount, NodePlan};
pub use self::running::Cluster;
pub(crate) use self::running::walkthrough;
pub use self::spec::ClusterSpec;
