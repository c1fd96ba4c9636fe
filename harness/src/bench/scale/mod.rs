//! `bench scale`: what the claims of another node cost the provisioner of a node and its peer, what the placement of a claim costs the
//! controller beside many nodes, and what many nodes cost the API server.
//!
//! The part [`one_node`] measures one provisioner and its peer, the part [`placement`] the controller, and the part [`fleet`] many
//! provisioners, each on control planes of its own.
//!
//! In the first part, the provisioner is the program of the driver's image, as a process of this machine beside a control plane without
//! nodes, with the rights of the manifests. One contender has the component claim-labels and watches only the claims with the label of
//! its node. The other one watches all claims of the cluster. The driver to which it connects has no storage, so nothing but the API server
//! affects the measurements.
//!
//! The peer is external-provisioner with `--node-deployment` and external-resizer, which would both run on each node. They are measured
//! at the same time, beside the same claims, in turn with the provisioner. Each has a CSI controller whose volumes are in memory, of which
//! nothing is counted. They have the administrator's rights and the options of `bench provision`. The rows `peer_*` are the sums of the
//! two. No PersistentVolumes exist, so the peer receives less than on a cluster, where both programs watch those of all nodes.
//!
//! A proxy counts the bytes that a process receives on its connections to the API server, those of the peer in the same way. They are
//! encrypted, and compressed if the API server compresses a response. The requests of all processes are counted in the audit log, with the
//! watches that start.
//!
//! The bench itself writes the record with which nodes rely on the labels, as the controller does when all claims are labelled.
//!
//! kube-controller-manager is stopped in that part, and the bench writes the claims as kube-controller-manager and the scheduler would.
//! There is no node with their volumes, so a running kube-controller-manager would write each claim again, as lost or as still to be
//! provisioned.
//!
//! In the part `fleet`, the provisioners of up to 1,000 nodes serve claims. They are tasks of one process, because so many processes do
//! not fit on a machine. Each has the client, the token, the volumes in memory and the watches of its own node.
//! kube-controller-manager runs, and binds the claims.
//!
//! The part [`annotations`] measures the memory of one provisioner beside claims with large annotations.

mod annotations;
mod claims;
mod fleet;
mod one_node;
mod placement;
mod process;

use anyhow::Result;
use testvm::session::Session;

use super::args::{Args, Part};
use super::measurement::Environment;
use super::threshold::Requirement;

pub(super) async fn run(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let logs = session.workspace.reports("bench").join("scale");
    let mut parts = Vec::new();
    if args.runs(Part::Claims) {
        parts.push(Box::pin(one_node::run(session, args, &logs.join("one-node"))).await?);
    }
    if args.runs(Part::Placement) {
        parts.push(Box::pin(placement::run(session, args, &logs.join("placement"))).await?);
    }
    if args.runs(Part::Annotations) {
        parts.push(Box::pin(annotations::run(session, args, &logs.join("annotations"))).await?);
    }
    if args.runs(Part::Fleet) {
        parts.push(Box::pin(fleet::run(session, args, &logs)).await?);
    }
    Ok(parts)
}

pub(super) fn requirements(args: &Args) -> Vec<Requirement> {
    let parts = [
        (Part::Claims, one_node::requirements()),
        (Part::Placement, placement::requirements()),
        (Part::Annotations, annotations::requirements()),
        (Part::Fleet, fleet::requirements()),
    ];
    parts.into_iter().filter(|(part, _)| args.runs(*part)).flat_map(|(_, of_part)| of_part).collect()
}
