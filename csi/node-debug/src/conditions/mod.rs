//! Named conditions of the node, which clients evaluate and wait for.

mod node;
mod plugin;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use csi::DriverName;
use csi::volume_mounts::{mount_points, require_project_quotas};
use loopfs::volume_store::VolumeId;
use node::NodeQuery;
use plugin::Registration;
use tokio::time::Instant;
use tonic::Status;

use crate::cluster::ApiServerAccess;
use crate::disk::Disk;
use crate::proto::{ConditionResponse, KnownCondition};

/// The interval at which a wait evaluates its condition.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The names of the conditions, of their arguments, and what they say.
const CONDITIONS: [(&str, &str, &str); 5] = [
    ("plugin-serving", "", "the CSI driver serves its registration socket"),
    ("plugin-registered", "", "the same, and the kubelet has entered the driver in the CSINode of this node"),
    ("quota-enforced", "", "the data directory is mounted, and its project quotas are enforced"),
    ("node-ready", "", "the Node of this node is Ready"),
    ("volume-published", "VOLUME", "the volume is mounted outside of the data directory"),
];

/// Returns the conditions that can be requested.
pub(crate) fn known() -> Vec<KnownCondition> {
    let condition = |(name, argument, description): (&str, &str, &str)| KnownCondition {
        name: name.to_owned(),
        argument: argument.to_owned(),
        description: description.to_owned(),
    };
    CONDITIONS.map(condition).into()
}

/// What the conditions are about.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conditions {
    pub(crate) driver_name: Option<DriverName>,
    pub(crate) registration_dir: PathBuf,
    pub(crate) data_dir: Option<PathBuf>,
    pub(crate) node_name: Option<String>,
    pub(crate) cluster: Option<ApiServerAccess>,
    pub(crate) disk: Disk,
}

/// A valid request for a condition.
#[derive(Clone)]
enum Query {
    PluginServing(Registration),
    PluginRegistered(Registration, NodeQuery),
    QuotaEnforced(PathBuf),
    NodeReady(NodeQuery),
    VolumePublished(PathBuf, VolumeId),
}

impl Conditions {
    /// Evaluates a condition once.
    pub(crate) async fn evaluate(&self, name: &str, argument: &str) -> Result<ConditionResponse, Status> {
        let query = self.query(name, argument)?;
        Ok(response(self.evaluate_query(&query).await))
    }

    /// Evaluates a condition until it is met or until the deadline. Returns the last evaluation that ended.
    pub(crate) async fn wait(
        &self,
        name: &str,
        argument: &str,
        deadline: Instant,
    ) -> Result<ConditionResponse, Status> {
        let query = self.query(name, argument)?;
        Ok(wait_until_met(|| self.evaluate_query(&query), deadline).await)
    }

    /// Reads the request: decides without I/O whether it can be evaluated.
    fn query(&self, name: &str, argument: &str) -> Result<Query, Status> {
        let missing = |option| {
            Status::failed_precondition(format!(
                "condition {name} needs option {option} of node-debug; start node-debug with it"
            ))
        };
        let registration = || {
            let driver = self.driver_name.clone().ok_or_else(|| missing("--driver-name"))?;
            Ok::<_, Status>(Registration { driver, directory: self.registration_dir.clone() })
        };
        let node = || {
            let cluster = self.cluster.clone().ok_or_else(|| missing("--kubeconfig"))?;
            let name = self.node_name.clone().ok_or_else(|| missing("--node-name"))?;
            Ok::<_, Status>(NodeQuery { cluster, client: Arc::default(), name })
        };
        let data_dir = || self.data_dir.clone().ok_or_else(|| missing("--data-dir"));
        Ok(match (name, argument) {
            ("plugin-serving", "") => Query::PluginServing(registration()?),
            ("plugin-registered", "") => Query::PluginRegistered(registration()?, node()?),
            ("quota-enforced", "") => Query::QuotaEnforced(data_dir()?),
            ("node-ready", "") => Query::NodeReady(node()?),
            ("volume-published", volume) if !volume.is_empty() => {
                let volume = volume.parse();
                let volume =
                    volume.map_err(|error: loopfs::Error| Status::invalid_argument(error.to_string()))?;
                Query::VolumePublished(data_dir()?, volume)
            }
            _ => {
                let full = |name: &str, argument: &str| [name, argument].join(" ").trim_end().to_owned();
                let known = CONDITIONS.map(|(name, argument, _)| full(name, argument)).join(", ");
                return Err(Status::not_found(format!(
                    "there is no condition \"{}\"; the conditions are {known}",
                    full(name, argument)
                )));
            }
        })
    }

    /// Returns what is the case if the condition is met, else why it is not. A failure to find out is a reason as well: the
    /// node may be starting, and a wait continues. Each part has its timeout.
    async fn evaluate_query(&self, query: &Query) -> anyhow::Result<String> {
        match query.clone() {
            Query::PluginServing(registration) => registration.serving().await,
            Query::PluginRegistered(registration, node) => {
                registration.serving().await?;
                node.has_driver(&registration.driver).await
            }
            Query::QuotaEnforced(data_dir) => {
                let read = move || {
                    require_project_quotas(&data_dir)?;
                    Ok(format!("{} enforces project quotas", data_dir.display()))
                };
                self.disk.read(read).await
            }
            Query::NodeReady(node) => node.ready().await,
            Query::VolumePublished(data_dir, volume) => {
                let read = move || {
                    let points = mount_points(&data_dir, &volume)?;
                    let points = points
                        .with_context(|| format!("there is no volume {volume} in {}", data_dir.display()))?;
                    ensure!(!points.is_empty(), "volume {volume} is mounted nowhere");
                    Ok(format!("volume {volume} is mounted at {points:?}"))
                };
                self.disk.read(read).await
            }
        }
    }
}

/// Evaluates until the condition is met or until the deadline. Returns the last evaluation that ended.
async fn wait_until_met<E: Future<Output = anyhow::Result<String>>>(
    evaluate: impl Fn() -> E,
    deadline: Instant,
) -> ConditionResponse {
    let no_result = "no result before the timeout".to_owned();
    let mut last = ConditionResponse { met: false, detail: no_result };
    while let Ok(evaluated) = tokio::time::timeout_at(deadline, evaluate()).await {
        last = response(evaluated);
        if last.met || Instant::now() >= deadline {
            break;
        }
        tokio::time::sleep_until(deadline.min(Instant::now() + POLL_INTERVAL)).await;
    }
    last
}

fn response(evaluated: anyhow::Result<String>) -> ConditionResponse {
    match evaluated {
        Ok(detail) => ConditionResponse { met: true, detail },
        Err(error) => ConditionResponse { met: false, detail: format!("{error:#}") },
    }
}

#[cfg(test)]
mod tests;
