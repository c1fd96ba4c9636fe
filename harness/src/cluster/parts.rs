//! The programs and disks that clusters are made of.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::images::{self, NodeParts};
use super::programs::Programs;
use crate::session::Session;
use crate::vm::Accelerator;

/// The programs and disks that clusters are made of.
#[derive(Debug)]
pub struct Parts {
    pub(super) programs: Programs,
    pub(super) node: NodeParts,
    /// The disk with the programs of Kubernetes that run on a node.
    pub(super) tools_disk: PathBuf,
}

impl Parts {
    /// Builds all parts that are not in the cache. It takes each program of Kubernetes from `kubernetes_bin`
    /// if it is there.
    ///
    /// # Errors
    /// A part cannot be fetched or built.
    pub async fn build(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Parts> {
        Parts::build_with(session, kubernetes_bin, &[]).await
    }

    /// Builds the parts with more programs in the nodes' [`TOOLS_DIR`]. `tools` has the name of each program
    /// there and its path on the host.
    ///
    /// # Errors
    /// As [`Parts::build`].
    pub(crate) async fn build_with(
        session: &Session,
        kubernetes_bin: Option<&Path>,
        tools: &[(String, PathBuf)],
    ) -> Result<Parts> {
        let programs = Programs::ensure(session, kubernetes_bin);
        let (programs, node) = tokio::try_join!(programs, NodeParts::prepare(session))?;
        let tools_disk = images::tools_disk(session, &programs, tools).await?;
        Ok(Parts { programs, node, tools_disk })
    }

    /// Returns the accelerator of the nodes.
    pub(crate) fn accelerator(&self) -> Accelerator {
        self.node.hypervisor.accelerator
    }
}
