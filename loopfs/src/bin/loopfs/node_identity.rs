//! `loopfs node-identity`: the names by which Kubernetes knows this machine.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use loopfs::node_identity::{machine_id, node_name, os_name};

use crate::output::{Output, object, printable};

/// Print the node name, machine id and operating system in the form that Kubernetes accepts
///
/// The node name is the host name in lowercase. If the machine has none, or one that is no DNS subdomain of at most 63
/// characters, it is the machine id in hexadecimal. To give it to the kubelet:
///
///   kubelet --hostname-override="$(loopfs --json node-identity | jq --raw-output .node_name)"
///
/// If only the machine id or the operating system cannot be read, the command prints the reason on standard error, and null
/// in JSON. With --root, the host name is that of etc/hostname below the directory, and absolute links stay below it.
///
/// JSON: {"node_name", "machine_id" | null, "os_name" | null}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct NodeIdentity {
    /// The directory below which to read etc/hostname, etc/machine-id and etc/os-release
    #[arg(long, default_value = "/", value_name = "DIRECTORY")]
    root: PathBuf,
}

impl NodeIdentity {
    pub(crate) fn run(&self) -> Result<Output> {
        let name = node_name(&self.root)?;
        let id = or_report(machine_id(&self.root)).map(|id| id.to_string());
        let system = or_report(os_name(&self.root));
        let mut text = format!("node name   {name}\n");
        if let Some(id) = &id {
            text.push_str(&format!("machine id  {id}\n"));
        }
        if let Some(system) = &system {
            text.push_str(&format!("system      {system}\n"));
        }
        Ok(Output::new(text, &object! { node_name: name, machine_id: id, os_name: system })?)
    }
}

/// Returns a value that the node can be without, or prints why it cannot be read.
fn or_report<T>(value: loopfs::Result<T>) -> Option<T> {
    value.map_err(|error| eprintln!("loopfs: {}", printable(&error.to_string()))).ok()
}
