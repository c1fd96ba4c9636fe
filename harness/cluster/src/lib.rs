//! A Kubernetes control plane on the host and its nodes in virtual machines.
//!
//! The control plane is a set of processes on the host's loopback. A node is a virtual machine with
//! containerd, kubelet and kube-proxy, and a disk for data. [`NodePlan`] has what the caller adds: container
//! images, programs, and the mount of that disk. [`Cluster::boot_node`] adds a node.
//!
//! [`waiting`] waits for objects by watches, [`exec`] runs programs in pods, and [`background`] keeps a cluster
//! after the command that started it.
//!
//! ```no_run
//! use std::path::PathBuf;
//!
//! use testvm::session::Session;
//! use testvm_cluster::{
//!     Cluster, ClusterProfile, ClusterSpec, ContainerImage, DataMount, Durability, KubernetesSource, NodePlan,
//!     NodeVariant, Parts,
//! };
//!
//! /// Starts a cluster whose node has the image of a driver, prints how to use it, and stops it.
//! async fn run(session: &Session, init: PathBuf, pause: PathBuf, driver: PathBuf) -> anyhow::Result<()> {
//!     let image = ContainerImage {
//!         archive: "driver.tar",
//!         reference: "docker.io/library/driver:dev",
//!         files: vec![("/driver", driver)],
//!     };
//!     let plan = NodePlan {
//!         init,
//!         pause,
//!         images: vec![image],
//!         archives: Vec::new(),
//!         data_mount: DataMount { mount_point: "/data".into(), options: "prjquota".into() },
//!         tools: Vec::new(),
//!         services: Vec::new(),
//!         links: Vec::new(),
//!     };
//!     let parts = Parts::build(session, &NodeVariant::default(), async { Ok(plan) }, &KubernetesSource::default()).await?;
//!     let dir = session.workspace.target().join("cluster");
//!     let spec = ClusterSpec {
//!         logs: dir.join("logs"),
//!         dir,
//!         durability: Durability::Unsafe,
//!         profile: ClusterProfile::Default,
//!     };
//!     let cluster = Cluster::start(session, spec, parts).await?;
//!     println!("{}", cluster.walkthrough());
//!     cluster.stop().await
//! }
//! ```

pub mod api_error;
pub mod background;
mod components;
pub mod conformance;
mod control_plane;
pub mod docker;
pub mod exec;
pub mod gvisor;
mod images;
pub mod kind;
mod kubeconfig;
mod layout;
mod loopback;
mod node;
mod node_spec;
mod parts;
mod pki;
mod plan;
mod pod_token;
mod programs;
mod release;
mod running;
pub mod snapshotter;
mod spec;
pub mod started_programs;
mod trace;
mod variant;
pub mod waiting;

pub use self::components::{ClusterProfile, Durability};
pub use self::control_plane::ControlPlane;
pub use self::layout::Layout;
pub use self::node::Node;
pub use self::node_spec::{
    DataDisk, KUBELET_DIRECTORY, KUBELET_ROOT, TOOLS_DIR, USER_NAMESPACES_HANDLER, log_file,
};
pub use self::parts::Parts;
pub use self::pki::{Authority, Identity, Subject};
pub use self::plan::{ContainerImage, DataMount, Link, NodePlan, NodeService};
pub use self::release::{KubernetesMinor, KubernetesSource};
pub use self::running::{Cluster, walkthrough};
pub use self::spec::ClusterSpec;
pub use self::variant::{Kubelet, KubeletRoot, NodeVariant, PATCHED_SUFFIX};
