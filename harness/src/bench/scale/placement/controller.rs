//! The controller as the process under test.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::super::measured_process::{Installation, MeasuredProcess, Role};

const ROLE: Role = Role {
    name: "controller",
    title: "controller",
    metrics: "loopfs_controller",
    // Shorter than the five seconds after which the leader renews its Lease.
    quiet_time: Duration::from_secs(2),
};

/// Starts a replica, and waits until it leads, has read the objects of the API server and is idle.
pub(super) async fn start(installation: &Installation<'_>, log: &Path) -> Result<MeasuredProcess> {
    let controller = MeasuredProcess::start(ROLE, installation, log, |program, _| program).await?;
    controller.until_metric("leads", 1.0).await?;
    // A replica is ready before it leads. From then on, it is ready when it has read the claims, classes and CSINodes.
    controller.until_ready().await?;
    controller.until_idle().await?;
    Ok(controller)
}
