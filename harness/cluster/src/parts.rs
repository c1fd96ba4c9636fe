//! The programs and disks that clusters are made of.

use std::path::PathBuf;

use anyhow::Result;
use testvm::session::Session;
use testvm::vm::Accelerator;

use super::images::{self, NodeParts};
use super::plan::NodePlan;
use super::programs::Programs;
use super::release::KubernetesMinor;
use super::variant::NodeVariant;

/// The programs and disks that clusters are made of.
#[derive(Debug)]
pub struct Parts {
    pub(super) programs: Programs,
    pub(super) node: NodeParts,
    /// The disk with the programs of Kubernetes that run on a node.
    pub(super) tools_disk: PathBuf,
}

impl Parts {
    /// Builds all parts that are not in the cache. It awaits `plan` while it builds the parts that do not
    /// depend on it.
    ///
    /// # Errors
    /// A part cannot be fetched or built, or the error of `plan`.
    pub async fn build(
        session: &Session,
        variant: &NodeVariant,
        plan: impl Future<Output = Result<NodePlan>>,
        kubernetes: KubernetesMinor,
    ) -> Result<Parts> {
        let programs = Box::pin(Programs::ensure(session, variant.kubelet, kubernetes));
        let node = Box::pin(NodeParts::prepare(session, variant, plan));
        let (programs, node) = tokio::try_join!(programs, node)?;
        let tools_disk = images::tools_disk(session, &programs, &node.plan.tools).await?;
        Ok(Parts { programs, node, tools_disk })
    }

    /// Returns the accelerator of the nodes.
    pub fn accelerator(&self) -> Accelerator {
        self.node.hypervisor.accelerator
    }
}
