//! gVisor: a runtime whose pods have a kernel of their own, in user space. It needs no virtualisation. Nodes whose
//! [`NodePlan::tools`](super::NodePlan::tools) have its [`programs`] run it.

use std::path::PathBuf;

use anyhow::Result;
use testvm::go_build::{self, GoModule};
use testvm::session::Session;

/// The handler of containerd that runs pods with gVisor.
pub const GVISOR_HANDLER: &str = "gvisor";
/// The file with the options of the shim, which containerd passes to it by name.
pub(crate) const OPTIONS_FILE: &str = "/etc/containerd/runsc.toml";

const GVISOR: GoModule = GoModule {
    // The main package has the name of its directory.
    renamed: &[("shim", SHIM)],
    ..GoModule::new("gvisor", "gvisor.dev/gvisor")
};
/// The runtime.
const RUNSC: &str = "runsc";
/// The program by which containerd starts and watches it.
const SHIM: &str = "containerd-shim-runsc-v1";

/// Builds the programs, or takes them from the cache. Returns the name of each in
/// [`NodePlan::tools`](super::NodePlan::tools), and its path on the host.
///
/// # Errors
/// Go is missing, or the module cannot be fetched or built.
pub async fn programs(session: &Session) -> Result<Vec<(String, PathBuf)>> {
    let directory = go_build::build(session, &GVISOR).await?;
    Ok([RUNSC, SHIM].map(|name| (name.to_owned(), directory.join(name))).into())
}

/// Returns `true` if a node with these tools can run gVisor.
pub(crate) fn is_among(tools: &[(String, PathBuf)]) -> bool {
    tools.iter().any(|(name, _)| name == SHIM)
}

/// Returns the table of the handler for the configuration of containerd. `directory` has the programs on the node.
pub(crate) fn handler(directory: &str) -> String {
    format!(
        r#"    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{GVISOR_HANDLER}]
      runtime_type = "io.containerd.runsc.v1"
      runtime_path = "{directory}/{SHIM}"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{GVISOR_HANDLER}.options]
        TypeUrl = "io.containerd.runsc.v1.options"
        ConfigPath = "{OPTIONS_FILE}"
"#
    )
}

/// Returns the options of the shim.
pub(crate) fn options(directory: &str) -> String {
    format!("binary_name = \"{directory}/{RUNSC}\"\n")
}
