//! `loopfs node-identity`: the names by which Kubernetes knows this machine.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use loopfs::node_identity::{machine_id, node_name, os_name};

use crate::output::{Output, object};

/// Print the node name, machine id and operating system in the form that Kubernetes accepts
///
/// The node name is the host name in lowercase. If the machine has none, or one that is no DNS subdomain, it is the machine id
/// in hexadecimal. To give it to the kubelet:
///
///   kubelet --hostname-override="$(loopfs --json node-identity | jq --raw-output .node_name)"
///
/// JSON: {"node_name", "machine_id", "os_name"}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct NodeIdentity {
    /// The directory below which to read etc/machine-id, etc/os-release and proc/sys/kernel/hostname
    #[arg(long, default_value = "/", value_name = "DIRECTORY")]
    root: PathBuf,
}

impl NodeIdentity {
    pub(crate) fn run(&self) -> Result<Output> {
        let (name, id, system) =
            (node_name(&self.root)?, machine_id(&self.root)?.to_string(), os_name(&self.root)?);
        let text = format!("node name   {name}\nmachine id  {id}\nsystem      {system}\n");
        Ok(Output::new(text, &object! { node_name: name, machine_id: id, os_name: system })?)
    }
}
