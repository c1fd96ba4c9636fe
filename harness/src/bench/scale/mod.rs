//! `bench scale`: what the claims of another node cost the provisioner of a node, what the placement of a claim costs the controller
//! beside many nodes, and what many nodes cost the API server.
//!
//! The part [`placement`] measures the controller, and the part [`fleet`] many provisioners, each on control planes of its own.
//!
//! In the first part, the provisioner is the program of the driver's image, as a process of this machine beside a control plane without
//! nodes, with the rights of the manifests. One contender has the component claim-labels and watches only the claims with the label of
//! its node. The other one watches all claims of the cluster. The provisioner has no storage, so nothing but the API server affects the
//! measurements.
//!
//! A proxy counts the bytes that the process receives on its connections to the API server. They are encrypted, and compressed if the
//! API server compresses a response. The bench itself writes the record with which nodes rely on the labels, as the controller does
//! when all claims are labelled.
//!
//! kube-controller-manager is stopped in that part, and the bench writes the claims as kube-controller-manager and the scheduler would.
//! There is no node with their volumes, so a running kube-controller-manager would write each claim again, as lost or as still to be
//! provisioned.
//!
//! In the part `fleet`, the provisioners of up to 1,000 nodes serve claims. They are tasks of one process, because so many processes do
//! not fit on a machine. Each has the client, the token, the volumes in memory and the watches of its own node.
//! kube-controller-manager runs, and binds the claims.

mod claims;
mod counting_proxy;
mod fleet;
mod fleet_claims;
mod fleet_process;
mod labels;
mod measured_process;
mod numbered;
mod placement;
mod provisioner;
mod run;

pub(super) use self::run::run;
