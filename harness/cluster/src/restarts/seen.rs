//! The restarts of containers that were seen, and those that nothing explains.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use kube::ResourceExt;

use super::caused::Caused;
use crate::containers::Container;
use crate::workload::node_of;

/// The pods that were seen, by their UID.
#[derive(Debug, Default)]
pub(super) struct Seen(BTreeMap<String, SeenPod>);

#[derive(Debug, Default)]
pub(super) struct SeenPod {
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

/// A container that restarted, or a pod that was deleted.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) pod: String,
    pub(super) container: Option<String>,
    pub(super) text: String,
}

impl Seen {
    /// Records the state of all pods that exist.
    pub(super) fn list<'a>(&mut self, pods: impl Iterator<Item = &'a Pod>) {
        self.0.values_mut().for_each(|pod| pod.gone = true);
        for pod in pods {
            self.pod(pod).gone = pod.metadata.deletion_timestamp.is_some();
        }
    }

    /// Records the state of a pod.
    pub(super) fn pod(&mut self, pod: &Pod) -> &mut SeenPod {
        let seen = self.0.entry(pod.uid().unwrap_or_default()).or_default();
        seen.name = pod.name_any();
        seen.node = node_of(pod).unwrap_or_default().to_owned();
        for (_, status) in Container::all(pod) {
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

    /// Counts the restarts so far as reported that `caused` does not explain. Those that it explains stay explained, and one that it
    /// explains may not have been counted yet.
    pub(super) fn forgive(&mut self, caused: &Caused) {
        for (uid, pod) in &mut self.0 {
            for (name, container) in &mut pod.containers {
                container.reported = (container.restarts - caused.restarts(uid, name)).max(0);
            }
        }
    }

    /// Returns what was not reported yet and is not in `caused`.
    pub(super) fn unexpected(&mut self, caused: &Caused) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (uid, pod) in &mut self.0 {
            for (name, container) in &mut pod.containers {
                let more = container.restarts - container.reported - caused.restarts(uid, name);
                if more > 0 {
                    container.reported += more;
                    let text = format!(
                        "container {name} of pod {} restarted, which the test did not cause ({more} of {} restarts); its \
                         last instance {}",
                        pod.name,
                        container.restarts,
                        end(container.last.as_ref())
                    );
                    findings.push(Finding { pod: uid.clone(), container: Some(name.clone()), text });
                }
            }
            if pod.gone && !pod.gone_reported && !caused.has_replaced(uid) {
                pod.gone_reported = true;
                let text = format!(
                    "pod {} of node {} was deleted, which the test did not cause",
                    pod.name, pod.node
                );
                findings.push(Finding { pod: uid.clone(), container: None, text });
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
        seen.unexpected(caused).into_iter().map(|finding| finding.text).collect()
    }

    /// The report has the exit code of the previous instance.
    #[test]
    fn unexpected_restart_is_reported_once() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        seen.list([pod("a", 3, 0)].iter());
        seen.forgive(&caused);
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

    /// A later list may be the first that counts the restart.
    #[test]
    fn kill_explains_one_restart() {
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

    /// The kill happened before the watch began.
    #[test]
    fn earlier_kill_explains_no_later_restart() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        for _ in 0..2 {
            caused.kill(&pod("a", 0, 0), "csi");
        }
        seen.list([pod("a", 1, 1)].iter());
        seen.forgive(&caused);
        seen.list([pod("a", 2, 1)].iter());
        assert!(texts(&mut seen, &caused).is_empty(), "the second kill was counted later");
        seen.list([pod("a", 3, 2)].iter());
        assert_eq!(texts(&mut seen, &caused).len(), 2);
    }

    #[test]
    fn reboot_explains_one_restart_per_container() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        caused.reboot([&pod("a", 0, 0)]);
        seen.list([pod("a", 1, 1)].iter());
        assert!(texts(&mut seen, &caused).is_empty());
        // The pod was created later.
        seen.list([pod("a", 1, 1), pod("b", 1, 0)].iter());
        assert_eq!(texts(&mut seen, &caused).len(), 1);
    }

    #[test]
    fn restart_of_deleted_pod_is_reported() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        caused.replace([&pod("a", 0, 0)]);
        seen.list([pod("a", 0, 0)].iter());
        seen.pod(&pod("a", 1, 0));
        seen.list([pod("b", 0, 0)].iter());
        let texts = texts(&mut seen, &caused);
        assert!(texts.len() == 1 && texts[0].starts_with("container csi of pod pod-a"), "{texts:?}");
    }

    #[test]
    fn unexpectedly_deleted_pod_is_reported_once() {
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
    fn restart_of_new_pod_is_reported() {
        let (mut seen, caused) = (Seen::default(), Caused::default());
        seen.list([].iter());
        seen.forgive(&caused);
        seen.list([pod("a", 1, 0)].iter());
        assert_eq!(texts(&mut seen, &caused).len(), 1);
    }
}
