//! What a test does to containers, and which restarts this explains.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// The restarts that a test causes. The restart of a container can be counted after the test that caused it, so a cause is kept
/// for as long as its pod.
#[derive(Debug, Default)]
pub struct Caused(Mutex<Causes>);

#[derive(Debug, Default)]
struct Causes {
    /// The UID of a pod, and the container that restarts, or `None` for all of them.
    restarts: Vec<(String, Option<String>)>,
    replaced: BTreeSet<String>,
}

impl Caused {
    /// Declares that the test kills a container of a pod once.
    pub fn kill(&self, pod: &Pod, container: &str) {
        self.causes().restarts.push((pod.uid().unwrap_or_default(), Some(container.to_owned())));
    }

    /// Declares that the test deletes these pods, or has them replaced.
    pub fn replace<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) {
        self.causes().replaced.extend(pods.into_iter().filter_map(ResourceExt::uid));
    }

    /// Declares that the test reboots the node of these pods once, which restarts each of their containers.
    pub fn reboot<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) {
        let pods = pods.into_iter().filter_map(ResourceExt::uid);
        self.causes().restarts.extend(pods.map(|pod| (pod, None)));
    }

    /// Returns `true` if the test deleted the pod with this UID, or had it replaced.
    pub(super) fn has_replaced(&self, pod: &str) -> bool {
        self.causes().replaced.contains(pod)
    }

    /// Returns how often the test restarted a container of the pod with this UID.
    pub(super) fn restarts(&self, pod: &str, container: &str) -> i32 {
        let explains = |(uid, name): &&(String, Option<String>)| {
            uid == pod && name.as_ref().is_none_or(|name| name == container)
        };
        i32::try_from(self.causes().restarts.iter().filter(explains).count()).unwrap_or(i32::MAX)
    }

    fn causes(&self) -> MutexGuard<'_, Causes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
