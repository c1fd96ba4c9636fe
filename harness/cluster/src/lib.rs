//! A Kubernetes control plane on the host and its nodes in virtual machines.
//!
//! The control plane is a set of processes on the host's loopback. A node is a virtual machine with
//! containerd, kubelet and kube-proxy, and a disk for data. [`NodePlan`] has what the caller adds: container
//! images, programs, and the mount of that disk. [`Cluster::boot_node`] adds a node.
//!
//! # Tests of a storage driver
//!
//! The crate knows no driver. The author of one brings:
//!
//! | what | where |
//! |---|---|
//! | images of static programs | [`NodePlan::images`]; others as archives that `testvm::images::oci` writes |
//! | manifests, as users apply them | [`manifests::Manifests`] |
//! | the mount of the data disk | [`NodePlan::data_mount`]; a second node can lack the disk ([`DataDisk`]) |
//! | programs and services of the node | [`NodePlan::tools`], [`NodePlan::services`] |
//! | what else a volume has on a node, such as devices | entries of [`leak_check::Entries`] |
//! | a definition for the storage tests of Kubernetes | [`conformance::Target::driver`] |
//!
//! and gets:
//!
//! | what | where |
//! |---|---|
//! | claims, and pods that mount them or have them as devices | [`workload`] |
//! | programs in pods, port forwarding, logs | [`exec`] |
//! | requests for objects, whose errors name the request | [`objects`] |
//! | waits for objects, events and log lines, by watches | [`waiting`] |
//! | kills and freezes of containers | [`containers`] |
//! | programs on the node as root | [`Node::exec`], [`Node::output`] |
//! | power cuts and boots of a node, and faults of the API server | [`Node::cut_power`], [`Node::boot`], [`Cluster::restart_api_server`] |
//! | files and mounts that a test left | [`leak_check`], [`mount_table`] |
//! | containers that restarted, and pods that were replaced, although the test did not cause it | [`restarts`] |
//! | the programs that the kubelet starts | [`started_programs`] |
//! | the storage tests of Kubernetes | [`conformance`] |
//! | releases of Kubernetes, kernels, kubelets | [`KubernetesMinor`], [`NodeVariant`] |
//! | results as a table, JUnit XML and JSON | `testvm::report` |
//!
//! `harness/src/lanes/second_driver` is a complete test of a driver with a kill and a leak check. [`background`] keeps a cluster after the
//! command that started it.

pub mod api_error;
pub mod background;
pub mod client;
mod components;
pub mod conformance;
pub mod containers;
mod control_plane;
pub mod docker;
pub mod exec;
mod files;
pub mod gvisor;
mod images;
pub mod kind;
mod kubeconfig;
mod layout;
pub mod leak_check;
mod loopback;
pub mod manifests;
pub mod mount_table;
mod node;
mod node_spec;
mod node_vm;
pub mod objects;
mod parts;
mod pki;
mod plan;
mod pod_token;
mod programs;
mod release;
pub mod restarts;
mod running;
pub mod snapshotter;
pub mod started_programs;
mod trace;
mod variant;
pub mod waiting;
pub mod workload;

pub use self::control_plane::ControlPlane;
pub use self::layout::{ClusterProfile, ClusterSpec, Durability, Layout};
pub use self::node::Node;
pub use self::node_spec::{
    DataDisk, KUBELET_DIRECTORY, KUBELET_ROOT, TOOLS_DIR, USER_NAMESPACES_HANDLER, log_file,
};
pub use self::node_vm::unless_node_ends;
pub use self::parts::Parts;
pub use self::pki::{Authority, Identity, Subject};
pub use self::plan::{ContainerImage, DataMount, Link, NodePlan, NodeService};
pub use self::programs::KIND_MINOR;
pub use self::release::KubernetesMinor;
pub use self::running::{Cluster, walkthrough};
pub use self::variant::{ContainerRuntime, Kubelet, KubeletRoot, NodeVariant, PATCHED_SUFFIX};
