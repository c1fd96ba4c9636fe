//! Containers that restarted and pods that were replaced, although the test did not cause it.
//!
//! A driver that panics and is restarted serves again before most tests notice. [`Watch`] therefore records the restarts of all
//! containers of some pods, also of pods that are deleted in the meantime, and the test declares in [`Caused`] what it does to
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use kube::api::{ListParams, LogParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use tokio::task::JoinHandle;

use super::api_error::api_error;
use super::containers::Container;
use super::exec::previous_log_tail;

/// The number of log lines of a container that are part of a finding.
const LOG_TAIL_LINES: i64 = 15;
/// Added to the age of the log lines that are read, because the kubelet counts in whole seconds.
const LOG_MARGIN: i64 = 2;
/// What Rust and its runtimes log of a panic.
const PANIC: &str = "panicked";

/// The restarts that a test causes. The restart of a container can be counted after the test that caused it, so a cause is kept
/// for as long as its pod.
#[derive(Debug, Default)]
pub struct Caused(Mutex<Causes>);

#[derive(Debug, Default)]
struct Causes {
    kills: Vec<(String, String)>,
    replaced: BTreeSet<String>,
    reboots: Vec<String>,
}

impl Caused {
    /// Declares that the test kills a container of a pod once.
    pub fn kill(&self, pod: &Pod, container: &str) {
        self.causes().kills.push((pod.uid().unwrap_or_default(), container.to_owned()));
    }

    /// Declares that the test deletes these pods, or has them replaced.
    pub fn replace<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) {
        self.causes().replaced.extend(pods.into_iter().filter_map(ResourceExt::uid));
    }

    /// Declares that the test reboots a node once, which restarts each container there.
    pub fn reboot(&self, node: &str) {
        self.causes().reboots.push(node.to_owned());
    }

    fn causes(&self) -> MutexGuard<'_, Causes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Causes {
    fn restarts(&self, pod: &SeenPod, container: &str) -> i32 {
        let kills = self.kills.iter().filter(|(uid, name)| *uid == pod.uid && name == container).count();
        let reboots = self.reboots.iter().filter(|node| **node == pod.node).count();
        i32::try_from(kills + reboots).unwrap_or(i32::MAX)
    }
}

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
    tasks: Vec<JoinHandle<()>>,
    /// The time of the last check.
    checked: Instant,
    /// The panics that were reported, by the container and the line of its log.
    panics: BTreeSet<(String, String, String)>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Watch {
    /// Starts to watch the pods that exist, and those that are created later. Earlier restarts of the former do not count.
    ///
    /// # Errors
    /// The pods cannot be listed.
    pub async fn start(scopes: Vec<Scope>) -> Result<Watch> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (tasks, checked) = (Vec::new(), Instant::now());
        let mut watch = Watch { scopes, seen, tasks, checked, panics: BTreeSet::new() };
        watch.list().await?;
        watch.seen().forgive();
        for scope in &watch.scopes {
            watch.tasks.push(tokio::spawn(record(scope.clone(), Arc::clone(&watch.seen))));
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
        let findings = self.seen().unexpected(&caused.causes());
        let mut texts = Vec::new();
        for finding in findings {
            texts.push(match pods.iter().find(|(_, pod)| pod.uid().as_deref() == Some(&finding.pod)) {
                Some((scope, pod)) => {
                    let (name, container) = (pod.name_any(), &finding.container);
                    let log = previous_log_tail(&scope.pods, &name, container, LOG_TAIL_LINES).await;
                    format!("{}; its last log lines:\n{}", finding.text, log.trim_end())
                }
                None => finding.text,
            });
        }
        for (scope, pod) in &pods {
            for (container, status) in Container::all(pod) {
                if container.is_some() {
                    self.find_panics(scope, pod, status, age, &mut texts).await?;
                }
            }
        }
        Ok(texts)
    }

    async fn find_panics(
        &mut self,
        scope: &Scope,
        pod: &Pod,
        status: &ContainerStatus,
        age: i64,
        texts: &mut Vec<String>,
    ) -> Result<()> {
        let (name, container) = (pod.name_any(), &status.name);
        let recent = LogParams {
            container: Some(container.clone()),
            since_seconds: Some(age),
            ..LogParams::default()
        };
        let log = scope.pods.logs(&name, &recent).await.map_err(api_error);
        let log = log.with_context(|| format!("read the log of container {container} of pod {name}"))?;
        for line in log.lines().filter(|line| line.contains(PANIC)) {
            let panic = (pod.uid().unwrap_or_default(), container.clone(), line.to_owned());
            if self.panics.insert(panic) {
                texts.push(format!("container {container} of pod {name} logged a panic: {line}"));
            }
        }
        Ok(())
    }

    /// Lists the pods and records their state, which the watch may not have seen yet.
    async fn list(&self) -> Result<Vec<(Scope, Pod)>> {
        let mut listed = Vec::new();
        for scope in &self.scopes {
            let pods = scope.pods.list(&ListParams::default().labels(&scope.labels)).await;
            let pods = pods.map_err(api_error);
            let pods = pods.with_context(|| format!("list the pods with the labels {}", scope.labels))?;
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

/// The pods that were seen, by their UID.
#[derive(Debug, Default)]
struct Seen {
    pods: BTreeMap<String, SeenPod>,
}

#[derive(Debug, Default)]
struct SeenPod {
    uid: String,
    name: String,
    node: String,
    /// `true` if the last list did not have it, or it was being deleted then.
    gone: bool,
    gone_reported: bool,
    containers: BTreeMap<String, SeenContainer>,
}

#[derive(Debug, Default)]
struct SeenContainer {
    restarts: i32,
    /// The restarts that were reported, and those before the watch.
    reported: i32,
    last: Option<ContainerStateTerminated>,
}

/// A container that restarted. If a pod was deleted, the container has no name.
#[derive(Debug)]
struct Finding {
    pod: String,
    container: String,
    text: String,
}

impl Seen {
    fn list<'a>(&mut self, pods: impl Iterator<Item = &'a Pod>) {
        for pod in self.pods.values_mut() {
            pod.gone = true;
        }
        for pod in pods {
            let gone = pod.metadata.deletion_timestamp.is_some();
            self.pod(pod).gone = gone;
        }
    }

    fn pod(&mut self, pod: &Pod) -> &mut SeenPod {
        let uid = pod.uid().unwrap_or_default();
        let seen = self.pods.entry(uid.clone()).or_default();
        seen.uid = uid;
        seen.name = pod.name_any();
        seen.node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        for status in pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten()) {
            let container = seen.containers.entry(status.name.clone()).or_default();
            // A list can be older than what the watch has seen.
            if status.restart_count >= container.restarts {
                container.restarts = status.restart_count;
                let terminated = status.last_state.as_ref().and_then(|state| state.terminated.clone());
                container.last = terminated.or(container.last.take());
            }
        }
        seen
    }

    /// Counts all restarts as reported.
    fn forgive(&mut self) {
        for container in self.pods.values_mut().flat_map(|pod| pod.containers.values_mut()) {
            container.reported = container.restarts;
        }
    }

    /// Returns what was not reported yet and is not in `causes`.
    fn unexpected(&mut self, causes: &Causes) -> Vec<Finding> {
        let mut findings = Vec::new();
        for pod in self.pods.values_mut() {
            let expected: Vec<i32> = pod.containers.keys().map(|name| causes.restarts(pod, name)).collect();
            for ((name, container), expected) in pod.containers.iter_mut().zip(expected) {
                let more = container.restarts - container.reported - expected;
                if more > 0 {
                    container.reported += more;
                    let text = format!(
                        "container {name} of pod {} restarted, which the test did not cause ({more} of {} restarts); its \
                         last instance {}",
                        pod.name,
                        container.restarts,
                        end(container.last.as_ref())
                    );
                    findings.push(Finding { pod: pod.uid.clone(), container: name.clone(), text });
                }
            }
            if pod.gone && !pod.gone_reported && !causes.replaced.contains(&pod.uid) {
                pod.gone_reported = true;
                let text = format!(
                    "pod {} of node {} was deleted, which the test did not cause",
                    pod.name, pod.node
                );
                findings.push(Finding { pod: pod.uid.clone(), container: String::new(), text });
            }
        }
        findings
    }
}

/// Returns how an instance of a container ended.
fn end(last: Option<&ContainerStateTerminated>) -> String {
    let Some(last) = last else { return "ended in an unknown way".to_owned() };
    let reason = last.reason.as_deref().unwrap_or("no reason");
    let message = last.message.as_deref().map(|message| format!(": {}", message.trim_end()));
    format!("ended with exit code {} ({reason}){}", last.exit_code, message.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, csi: i32, provisioner: i32) -> Pod {
        let status = |name: &str, restarts: i32| {
            let mut status = json!({
                "name": name, "restartCount": restarts, "ready": true, "image": "", "imageID": "",
                "state": {"running": {}},
            });
            if restarts > 0 {
                status["lastState"] = json!({"terminated": {"exitCode": 101, "reason": "Error"}});
            }
            status
        };
        serde_json::from_value(json!({
            "metadata": {"name": format!("pod-{uid}"), "uid": uid},
            "spec": {"nodeName": "node-0", "containers": []},
            "status": {"containerStatuses": [status("csi", csi), status("provisioner", provisioner)]},
        }))
        .unwrap()
    }

    fn texts(seen: &mut Seen, caused: &Caused) -> Vec<String> {
        seen.unexpected(&caused.causes()).into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn a_restart_that_the_test_did_not_cause_is_reported_once_with_its_end() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        seen.list([pod("a", 3, 0)].iter());
        seen.forgive();
        assert!(texts(&mut seen, &caused).is_empty());
        seen.list([pod("a", 3, 1)].iter());
        assert_eq!(
            texts(&mut seen, &caused),
            [
                "container provisioner of pod pod-a restarted, which the test did not cause (1 of 1 restarts); its last \
                 instance ended with exit code 101 (Error)"
            ]
        );
        assert!(texts(&mut seen, &caused).is_empty());
    }

    #[test]
    fn a_kill_explains_one_restart_of_its_container_whenever_it_is_counted() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        caused.kill(&pod("a", 0, 0), "csi");
        seen.list([pod("a", 0, 0)].iter());
        assert!(texts(&mut seen, &caused).is_empty());
        seen.list([pod("a", 1, 0)].iter());
        assert!(texts(&mut seen, &caused).is_empty());
        seen.list([pod("a", 2, 1)].iter());
        let texts = texts(&mut seen, &caused);
        assert!(texts[0].contains("container csi of") && texts[0].contains("(1 of 2 restarts)"), "{texts:?}");
        assert!(texts[1].starts_with("container provisioner"), "{texts:?}");
    }

    #[test]
    fn a_reboot_explains_one_restart_of_each_container_of_its_node() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        caused.reboot("node-1");
        seen.list([pod("a", 1, 0)].iter());
        assert_eq!(texts(&mut seen, &caused).len(), 1);
        caused.reboot("node-0");
        seen.list([pod("a", 2, 1)].iter());
        assert!(texts(&mut seen, &caused).is_empty());
    }

    #[test]
    fn a_restart_is_reported_although_its_pod_was_deleted_since() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        caused.replace([&pod("a", 0, 0)]);
        seen.list([pod("a", 0, 0)].iter());
        seen.pod(&pod("a", 1, 0));
        seen.list([pod("b", 0, 0)].iter());
        let texts = texts(&mut seen, &caused);
        assert!(texts.len() == 1 && texts[0].starts_with("container csi of pod pod-a"), "{texts:?}");
    }

    #[test]
    fn a_replaced_pod_is_reported_once_unless_the_test_replaced_it() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        seen.list([pod("a", 0, 0), pod("b", 0, 0)].iter());
        caused.replace([&pod("a", 0, 0)]);
        seen.list([pod("c", 0, 0)].iter());
        assert_eq!(
            texts(&mut seen, &caused),
            ["pod pod-b of node node-0 was deleted, which the test did not cause"]
        );
        assert!(texts(&mut seen, &caused).is_empty());
    }

    #[test]
    fn a_new_pod_that_restarts_is_reported() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        seen.list([].iter());
        seen.forgive();
        seen.list([pod("a", 1, 0)].iter());
        assert_eq!(texts(&mut seen, &caused).len(), 1);
    }
}
