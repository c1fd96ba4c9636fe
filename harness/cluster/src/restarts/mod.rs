//! Containers that restarted and pods that were replaced, although the test did not cause it.
//!
//! A driver that panics and is restarted serves again before most tests notice. [`Watch`] therefore records the restarts of all
//! containers of some pods, also of pods that are deleted in the meantime, and the test declares in [`Caused`] what it does to
//! them.

mod caused;
mod seen;

use std::collections::BTreeSet;
use std::mem;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::LogParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use tokio::task::JoinSet;

pub use self::caused::Caused;
use self::seen::{Finding, Seen};
use super::api_error::api_error;
use super::containers::Container;
use super::exec::previous_log_tail;
use super::objects;

/// The number of log lines of a container that are part of a finding.
const LOG_TAIL_LINES: i64 = 15;
/// Added to the age of the log lines that are read, because the kubelet counts in whole seconds.
const LOG_MARGIN: i64 = 2;
/// What Rust and its runtimes log of a panic.
const PANIC: &str = "panicked";

/// Pods to watch: those of a namespace that have these labels.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The pods of the namespace.
    pub pods: Api<Pod>,
    /// A label selector.
    pub labels: String,
}

/// Records the restarts of containers until it is dropped.
pub struct Watch {
    scopes: Vec<Scope>,
    seen: Arc<Mutex<Seen>>,
    /// They end when the set is dropped.
    tasks: JoinSet<()>,
    /// The time of the last check.
    checked: Instant,
    /// The panics that were reported, by the container and the line of its log.
    panics: BTreeSet<(String, String, String)>,
}

impl Watch {
    /// Starts to watch the pods that exist, and those that are created later. Earlier restarts of the former do not count, and
    /// neither do those of `caused` that explain them.
    ///
    /// # Errors
    /// The pods cannot be listed.
    pub async fn start(scopes: Vec<Scope>, caused: &Caused) -> Result<Watch> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (tasks, checked) = (JoinSet::new(), Instant::now());
        let mut watch = Watch { scopes, seen, tasks, checked, panics: BTreeSet::new() };
        watch.list().await?;
        watch.seen().forgive(caused);
        for scope in &watch.scopes {
            watch.tasks.spawn(record(scope.clone(), Arc::clone(&watch.seen)));
        }
        Ok(watch)
    }

    /// Returns what happened since the last call and is not in `caused`: one text for each container that restarted, for each
    /// pod that was deleted, and for each panic in the log of a container that runs.
    ///
    /// # Errors
    /// The pods cannot be listed, or the log of a container that runs cannot be read.
    pub async fn unexpected(&mut self, caused: &Caused) -> Result<Vec<String>> {
        let checked = mem::replace(&mut self.checked, Instant::now());
        let age = i64::try_from(checked.elapsed().as_secs()).unwrap_or(i64::MAX - LOG_MARGIN) + LOG_MARGIN;
        let pods = self.list().await?;
        let findings = self.seen().unexpected(caused);
        let mut texts = Vec::new();
        for Finding { pod, container, text } in findings {
            let pod = pods.iter().find(|(_, other)| other.uid().as_deref() == Some(&pod));
            texts.push(match (pod, container) {
                (Some((scope, pod)), Some(container)) => {
                    let log =
                        previous_log_tail(&scope.pods, &pod.name_any(), &container, LOG_TAIL_LINES).await;
                    format!("{text}; its last log lines:\n{}", log.trim_end())
                }
                _ => text,
            });
        }
        for (scope, pod) in &pods {
            for (_, status) in Container::all(pod).filter(|(container, _)| container.is_some()) {
                let (name, container) = (pod.name_any(), &status.name);
                let recent = LogParams {
                    container: Some(container.clone()),
                    since_seconds: Some(age),
                    ..LogParams::default()
                };
                let log = scope.pods.logs(&name, &recent).await.map_err(api_error);
                let log =
                    log.with_context(|| format!("read the log of container {container} of pod {name}"))?;
                for line in log.lines().filter(|line| line.contains(PANIC)) {
                    let panic = (pod.uid().unwrap_or_default(), container.clone(), line.to_owned());
                    if self.panics.insert(panic) {
                        texts.push(format!("container {container} of pod {name} logged a panic: {line}"));
                    }
                }
            }
        }
        Ok(texts)
    }

    /// Lists the pods and records their state, which the watch may not have seen yet.
    async fn list(&self) -> Result<Vec<(Scope, Pod)>> {
        let mut listed = Vec::new();
        for scope in &self.scopes {
            let pods = objects::list(&scope.pods, &scope.labels).await?;
            listed.extend(pods.into_iter().map(|pod| (scope.clone(), pod)));
        }
        self.seen().list(listed.iter().map(|(_, pod)| pod));
        Ok(listed)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records each change of the pods.
async fn record(Scope { pods, labels }: Scope, seen: Arc<Mutex<Seen>>) {
    let scope = watcher::Config::default().labels(&labels);
    let mut changes = pin!(watcher::watcher(pods, scope).default_backoff());
    while let Some(change) = changes.next().await {
        // The watcher retries after an error: the API server may be unavailable for a while.
        if let Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) | watcher::Event::Delete(pod)) =
            change
        {
            seen.lock().unwrap_or_else(PoisonError::into_inner).pod(&pod);
        }
    }
}
