//! `bench scale`: what the claims of another node cost the provisioner of a node, and what the placement of a claim costs the controller
//! beside many nodes.
//!
//! The part [`placement`] measures the controller, on a control plane of its own. The rest measures the provisioner.
//!
//! The provisioner is the program of the driver's image, as a process of this machine beside a control plane without nodes, with the
//! rights of the manifests. One contender has the component claim-labels and watches only the claims with the label of its node. The
//! other one watches all claims of the cluster. The provisioner has no storage, so nothing but the API server affects the measurements.
//!
//! A proxy counts the bytes that the process receives on its connections to the API server. They are encrypted, and compressed if the
//! API server compresses a response. The bench itself writes the record with which nodes rely on the labels, as the controller does
//! when all claims are labelled.
//!
//! kube-controller-manager is stopped, and the bench writes the claims as kube-controller-manager and the scheduler would. There is no
//! node with their volumes, so a running kube-controller-manager would write each claim again, as lost or as still to be provisioned.

mod claims;
mod counting_proxy;
mod labels;
mod measured_process;
mod placement;
mod provisioner;
mod run;

pub(super) use self::run::run;
