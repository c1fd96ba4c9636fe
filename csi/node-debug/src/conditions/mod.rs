//! Named conditions of the node, which clients evaluate and wait for.

mod evaluation;
mod node;
mod plugin;
mod storage;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use csi::DriverName;
use csi::inotify::{InotifyWatch, existing_ancestor};
use csi::mount_watch::MountWatch;
pub(crate) use evaluation::Evaluation;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::cluster::{ApiServerAccess, NodeObject};

/// The longest time for one evaluation, which may read from a disk, a socket or the API server.
const EVALUATION_TIMEOUT: Duration = Duration::from_secs(15);

/// Checks of the disk that may run concurrently. A check of a disk that hangs never ends.
const MAX_DISK_CHECKS: usize = 4;

/// A condition that the service knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NamedCondition {
    PluginServing,
    PluginRegistered,
    QuotaEnforced,
    NodeReady,
    VolumePublished,
}

impl NamedCondition {
    pub(crate) const ALL: [Self; 5] = [
        Self::PluginServing,
        Self::PluginRegistered,
        Self::QuotaEnforced,
        Self::NodeReady,
        Self::VolumePublished,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PluginServing => "plugin-serving",
            Self::PluginRegistered => "plugin-registered",
            Self::QuotaEnforced => "quota-enforced",
            Self::NodeReady => "node-ready",
            Self::VolumePublished => "volume-published",
        }
    }

    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::PluginServing => "the CSI driver serves its registration socket",
            Self::PluginRegistered => {
                "the same, and the kubelet has entered the driver in the CSINode of this node"
            }
            Self::QuotaEnforced => "the data directory is mounted, and its project quotas are enforced",
            Self::NodeReady => "the Node of this node is Ready",
            Self::VolumePublished => "the volume is mounted outside of the data directory",
        }
    }

    /// Returns the name of the argument, or an empty string if there is none.
    pub(crate) fn argument(self) -> &'static str {
        if self == Self::VolumePublished { "VOLUME" } else { "" }
    }

    fn named(name: &str) -> Result<Self, ConditionError> {
        Self::ALL
            .into_iter()
            .find(|condition| condition.name() == name)
            .ok_or_else(|| ConditionError::Unknown { name: name.to_owned() })
    }
}

/// A request that cannot be evaluated, whatever the state of the node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConditionError {
    Unknown {
        name: String,
    },
    Arguments {
        message: String,
    },
    /// The service has not been given an option that the condition needs.
    NotConfigured {
        condition: &'static str,
        option: &'static str,
    },
}

impl std::fmt::Display for ConditionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown { name } => {
                let known = NamedCondition::ALL.map(NamedCondition::name).join(", ");
                write!(f, "there is no condition {name:?}; the conditions are {known}")
            }
            Self::Arguments { message } => f.write_str(message),
            Self::NotConfigured { condition, option } => {
                write!(
                    f,
                    "condition {condition} needs option {option} of node-debug; start node-debug with it"
                )
            }
        }
    }
}

/// What the conditions are about.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConditionSubject {
    pub(crate) driver_name: Option<DriverName>,
    pub(crate) registration_dir: PathBuf,
    pub(crate) data_dir: Option<PathBuf>,
    pub(crate) node_name: Option<String>,
    pub(crate) cluster: Option<ApiServerAccess>,
}

/// Evaluates conditions.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    subject: Arc<ConditionSubject>,
    disk_checks: Arc<Semaphore>,
}

/// A valid request for a condition.
#[derive(Clone, Debug)]
enum Query {
    PluginServing(plugin::Registration),
    PluginRegistered(plugin::Registration, node::NodeQuery),
    QuotaEnforced(PathBuf),
    NodeReady(node::NodeQuery),
    VolumePublished(storage::PublishedQuery),
}

impl Conditions {
    pub(crate) fn new(subject: ConditionSubject) -> Self {
        Self { subject: Arc::new(subject), disk_checks: Arc::new(Semaphore::new(MAX_DISK_CHECKS)) }
    }

    /// Evaluates a condition once.
    pub(crate) async fn evaluate(
        &self,
        name: &str,
        arguments: &[String],
    ) -> Result<Evaluation, ConditionError> {
        let query = self.query(name, arguments)?;
        Ok(self.evaluate_query(&query).await)
    }

    /// Waits until the condition is met or until the deadline. Returns the last evaluation.
    pub(crate) async fn wait(
        &self,
        name: &str,
        arguments: &[String],
        deadline: Instant,
    ) -> Result<Evaluation, ConditionError> {
        let query = self.query(name, arguments)?;
        // The watch begins before the first evaluation, so that no change is missed.
        Ok(match tokio::time::timeout_at(deadline, self.changes(&query)).await {
            Ok(changes) => wait_until_met(|| self.evaluate_query(&query), changes, deadline).await,
            Err(_elapsed) => no_result(),
        })
    }

    /// Reads the request: decides without I/O whether it can be evaluated.
    fn query(&self, name: &str, arguments: &[String]) -> Result<Query, ConditionError> {
        let condition = NamedCondition::named(name)?;
        let argument = match (condition.argument(), arguments) {
            ("", []) => None,
            ("", _) => {
                let message = format!("condition {name} takes no argument");
                return Err(ConditionError::Arguments { message });
            }
            (_, [argument]) => Some(argument),
            (argument, _) => {
                let message = format!("condition {name} takes one argument, {argument}");
                return Err(ConditionError::Arguments { message });
            }
        };
        let needs = |option| ConditionError::NotConfigured { condition: condition.name(), option };
        let subject = &self.subject;
        let registration = || {
            let driver = subject.driver_name.clone().ok_or(needs("--driver-name"))?;
            Ok(plugin::Registration { driver, directory: subject.registration_dir.clone() })
        };
        let node = || {
            let cluster = subject.cluster.clone().ok_or(needs("--kubeconfig"))?;
            Ok(node::NodeQuery { cluster, name: subject.node_name.clone().ok_or(needs("--node-name"))? })
        };
        let data_dir = || subject.data_dir.clone().ok_or(needs("--data-dir"));
        Ok(match condition {
            NamedCondition::PluginServing => Query::PluginServing(registration()?),
            NamedCondition::PluginRegistered => Query::PluginRegistered(registration()?, node()?),
            NamedCondition::QuotaEnforced => Query::QuotaEnforced(data_dir()?),
            NamedCondition::NodeReady => Query::NodeReady(node()?),
            NamedCondition::VolumePublished => {
                let volume = argument.map(String::as_str).unwrap_or_default();
                let volume = volume.parse().map_err(|error: loopfs::Error| ConditionError::Arguments {
                    message: error.to_string(),
                })?;
                Query::VolumePublished(storage::PublishedQuery { data_dir: data_dir()?, volume })
            }
        })
    }

    /// A failure to find out is an evaluation that is not met: the node may be starting, and a wait continues.
    async fn evaluate_query(&self, query: &Query) -> Evaluation {
        let evaluate = async {
            match query {
                Query::PluginServing(registration) => self.serving(registration).await,
                Query::PluginRegistered(registration, node) => {
                    let serving = self.serving(registration).await?;
                    if !serving.met {
                        return Ok(serving);
                    }
                    node.has_driver(&registration.driver).await
                }
                Query::QuotaEnforced(data_dir) => {
                    let data_dir = data_dir.clone();
                    check_disk(&self.disk_checks, move || Ok(storage::quota_enforced(&data_dir))).await
                }
                Query::NodeReady(node) => node.ready().await,
                Query::VolumePublished(query) => {
                    let query = query.clone();
                    check_disk(&self.disk_checks, move || query.published()).await
                }
            }
        };
        match tokio::time::timeout(EVALUATION_TIMEOUT, evaluate).await {
            Ok(Ok(evaluation)) => evaluation,
            Ok(Err(error)) => Evaluation::not_met(format!("{error:#}")),
            Err(_elapsed) => Evaluation::not_met(format!("no result within {EVALUATION_TIMEOUT:?}")),
        }
    }

    async fn serving(&self, registration: &plugin::Registration) -> anyhow::Result<Evaluation> {
        let absent = registration.clone();
        match check_disk(&self.disk_checks, move || absent.absent()).await? {
            Some(absent) => Ok(absent),
            None => registration.serving().await,
        }
    }

    /// Notifies of everything that can change the result.
    async fn changes(&self, query: &Query) -> BoxStream<'static, ()> {
        match query {
            Query::PluginServing(registration) => self.socket_changes(registration.socket()).await,
            Query::PluginRegistered(registration, node) => stream::select(
                self.socket_changes(registration.socket()).await,
                node.cluster.changes(NodeObject::CsiNode, &node.name),
            )
            .boxed(),
            Query::NodeReady(node) => node.cluster.changes(NodeObject::Node, &node.name),
            Query::QuotaEnforced(_) | Query::VolumePublished(_) => mount_changes(),
        }
    }

    /// Notifies of changes in the directory of a socket, also if the directory does not exist yet.
    async fn socket_changes(&self, path: PathBuf) -> BoxStream<'static, ()> {
        let checks = Arc::clone(&self.disk_checks);
        let watch = watch_directory(&checks, &path).await;
        stream::unfold((path, watch, checks), |(path, watch, checks)| async move {
            let watch = match watch {
                Some(watch) => match watch.watch.changed().await {
                    Ok(is_gone) => watch.renewed(&checks, &path, is_gone).await,
                    Err(_) => None,
                },
                None => {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    watch_directory(&checks, &path).await
                }
            };
            Some(((), (path, watch, checks)))
        })
        .boxed()
    }
}

/// Runs a check that may block on the disk.
async fn check_disk<T: Send + 'static>(
    checks: &Arc<Semaphore>,
    check: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let Ok(permit) = Arc::clone(checks).try_acquire_owned() else {
        anyhow::bail!("{MAX_DISK_CHECKS} checks of the disk have not ended; the disk may hang");
    };
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        check()
    })
    .await?
}

fn no_result() -> Evaluation {
    Evaluation::not_met("no result before the timeout".to_owned())
}

/// Evaluates after each change until the condition is met or until the deadline. Returns the last evaluation that ended.
async fn wait_until_met<E: Future<Output = Evaluation>>(
    evaluate: impl Fn() -> E,
    mut changes: BoxStream<'_, ()>,
    deadline: Instant,
) -> Evaluation {
    let mut last = no_result();
    loop {
        match tokio::time::timeout_at(deadline, evaluate()).await {
            Ok(evaluation) if evaluation.met => return evaluation,
            Ok(evaluation) => last = evaluation,
            Err(_elapsed) => return last,
        }
        let changed = tokio::time::timeout_at(deadline, changes.next()).await;
        // Constant changes do not extend the wait.
        if changed.is_err() || Instant::now() >= deadline {
            return last;
        }
    }
}

/// The wait after a watch could not be set up, before the condition is evaluated again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

fn mount_changes() -> BoxStream<'static, ()> {
    let watch = MountWatch::new().ok();
    stream::unfold(watch, |watch| async {
        match &watch {
            Some(watch) if watch.changed().await.is_ok() => {}
            _ => tokio::time::sleep(RETRY_INTERVAL).await,
        }
        Some(((), watch))
    })
    .boxed()
}

/// A watch on the nearest directory above a path that exists.
#[derive(Debug)]
struct AncestorWatch {
    directory: PathBuf,
    watch: InotifyWatch,
}

impl AncestorWatch {
    /// Returns a watch on the directory that is now the nearest one.
    async fn renewed(self, checks: &Arc<Semaphore>, path: &Path, is_gone: bool) -> Option<Self> {
        let sought = path.to_owned();
        let nearest = check_disk(checks, move || Ok(existing_ancestor(&sought).to_owned())).await.ok()?;
        if nearest == self.directory && !is_gone { Some(self) } else { watch_directory(checks, path).await }
    }
}

async fn watch_directory(checks: &Arc<Semaphore>, path: &Path) -> Option<AncestorWatch> {
    let path = path.to_owned();
    check_disk(checks, move || {
        let watch = InotifyWatch::new()?;
        // A directory that appears after this look is found by the second one.
        for _ in 0..2 {
            let directory = existing_ancestor(&path).to_owned();
            watch.add_directory(&directory)?;
            if existing_ancestor(&path) == directory {
                return Ok(AncestorWatch { directory, watch });
            }
        }
        anyhow::bail!("the directories above {} change", path.display())
    })
    .await
    .ok()
}

#[cfg(test)]
mod tests;
