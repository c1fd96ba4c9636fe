//! What the placement of an Immediate claim costs the controller beside many nodes.
//!
//! The controller is the program of the driver's image in its other role, with the rights of the manifests. The bench declares nodes
//! as their kubelets and provisioners would, and creates claims of classes that leave exactly one node. Each class leaves it in
//! another way: by the topology key of the driver, by a label of the Node, or by both.
//!
//! kube-controller-manager is stopped here too. It would create a pod of the driver for each declared node, and mark the nodes as not
//! ready because no kubelet renews their leases. The bench annotates the claims in its place.

mod classes;
mod controller;
mod declared_nodes;
mod run;

pub(super) use self::run::{run, thresholds};
