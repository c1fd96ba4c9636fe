//! The provisioner of a node as the process under test.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::ResourceExt;

use super::measured_process::{Installation, MeasuredProcess, Role};
use crate::test_env::claim_labels;

const ROLE: Role = Role {
    name: "node",
    title: "provisioner",
    metrics: "loopfs_provisioner",
    // The API server sends a bookmark on each watch about once a minute.
    quiet_time: Duration::from_secs(5),
};

/// The claims that a provisioner watches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Contender {
    /// Those with the label of its node, by the component claim-labels.
    Labels,
    /// All claims of the cluster.
    All,
}

impl Contender {
    pub(super) const BOTH: [Contender; 2] = [Contender::Labels, Contender::All];

    /// Returns the beginning of the names of its rows.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Contender::Labels => "labels",
            Contender::All => "all",
        }
    }
}

/// Starts the provisioner, and waits until it has read the objects of the API server and is idle.
pub(super) async fn start(
    installation: &Installation<'_>,
    contender: Contender,
    log: &Path,
) -> Result<MeasuredProcess> {
    let uid = installation.pod.uid().context("the pod of the driver has no UID")?;
    let provisioner = MeasuredProcess::start(ROLE, installation, log, |program, directory| {
        // An ordinary directory. On a node without a file system for volumes, the provisioner is ready all the same.
        let program = program.arg("--data-dir").arg(directory).env("POD_UID", uid);
        match contender {
            Contender::Labels => program.args(["--claim-labels", claim_labels::NAME]),
            Contender::All => program,
        }
    })
    .await?;
    provisioner.until_idle().await?;
    let scope = provisioner.metric("watches_all_claims").await?;
    let expected = f64::from(u8::from(contender == Contender::All));
    anyhow::ensure!(
        scope == Some(expected),
        "the provisioner does not watch the claims that it should: watches_all_claims is {scope:?}"
    );
    Ok(provisioner)
}
