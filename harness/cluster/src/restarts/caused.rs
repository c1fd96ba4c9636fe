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
pub(super) struct Causes {
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

    /// Declares that the test reboots the node of these pods once, which restarts each of their containers.
    pub fn reboot<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) {
        self.causes().reboots.extend(pods.into_iter().filter_map(ResourceExt::uid));
    }

    pub(super) fn causes(&self) -> MutexGuard<'_, Causes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Causes {
    /// Returns `true` if the test deleted the pod with this UID, or had it replaced.
    pub(super) fn has_replaced(&self, pod: &str) -> bool {
        self.replaced.contains(pod)
    }

    /// Returns how often the test restarted a container of the pod with this UID.
    pub(super) fn restarts(&self, pod: &str, container: &str) -> i32 {
        let kills = self.kills.iter().filter(|(uid, name)| uid == pod && name == container).count();
        let reboots = self.reboots.iter().filter(|rebooted| *rebooted == pod).count();
        i32::try_from(kills + reboots).unwrap_or(i32::MAX)
    }
}
