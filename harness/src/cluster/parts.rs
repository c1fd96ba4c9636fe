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
    /// Builds what is not there yet; Kubernetes' programs are taken from `kubernetes_bin` where they are
    /// there.
    ///
    /// # Errors
    /// Something cannot be fetched or built.
    pub async fn build(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Parts> {
        Parts::build_with(session, kubernetes_bin, &[]).await
    }

    /// The same, with more programs in the nodes' [`TOOLS_DIR`]: what each is called there, and where it is here.
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

    /// What nodes run on.
    pub(crate) fn accelerator(&self) -> Accelerator {
        self.node.hypervisor.accelerator
    }
}
