//! What every story works with: the cluster, the driver as its manifests describe it, and patience.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use super::manifests::Manifests;
use crate::cluster::api_error::told;
use crate::cluster::{Cluster, Node};

/// The cluster under test and the driver in it.
pub(super) struct World<'a> {
    pub(super) client: Client,
    /// The cluster, where it is one of ours: what is done to its control plane.
    pub(super) cluster: Option<&'a Cluster>,
    /// The node, where it is one of ours: what is asked of it that Kubernetes has no words for.
    pub(super) node: Option<&'a Node>,
    pub(super) manifests: Manifests,
    pub(super) driver: Driver,
    /// The namespace of the claims and pods of the stories.
    pub(super) namespace: String,
    pub(super) patience: Patience,
}

/// Why a step that needs the node itself is left out.
pub(super) const FOREIGN_NODE: &str = "the node is not ours: only Kubernetes' own API reaches it";

/// How long the cluster is given. Everything is awaited, so this is only spent when something is wrong.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Driver pods that start, claims that are bound, pods that run.
    pub(super) start: Duration,
    /// A claim that grows. Where the driver is away, a block volume waits for the kubelet, which looks at its
    /// size once in its sync period: a minute, and up to half of it more.
    pub(super) grow: Duration,
    /// Pods that end and volumes that go.
    pub(super) end: Duration,
}

impl Patience {
    /// For runs whose result is wanted: an emulated machine that is also building something is slow.
    pub(super) const FULL: Patience = Patience {
        start: Duration::from_secs(180),
        grow: Duration::from_secs(240),
        end: Duration::from_secs(180),
    };
    /// For runs that are broken on purpose, where waiting longer would change nothing.
    pub(super) const SHORT: Patience = Patience {
        start: Duration::from_secs(75),
        grow: Duration::from_secs(20),
        end: Duration::from_secs(60),
    };
}

/// The driver, read from its manifests.
#[derive(Clone, Debug)]
pub(super) struct Driver {
    pub(super) name: String,
    pub(super) class: StorageClass,
    namespace: String,
    daemon_set: String,
    pod_labels: String,
    containers: Vec<String>,
}

impl Driver {
    pub(super) fn of(manifests: &Manifests) -> Result<Driver> {
        let driver: CSIDriver = manifests.only("CSIDriver")?;
        let daemon_set: DaemonSet = manifests.only("DaemonSet")?;
        let spec = daemon_set.spec.as_ref().context("the DaemonSet has no spec")?;
        let labels = spec.selector.match_labels.as_ref().context("the DaemonSet selects by no labels")?;
        let pod_labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let pod = spec.template.spec.as_ref().context("the DaemonSet's pods have no spec")?;
        Ok(Driver {
            name: driver.name_any(),
            class: manifests.only("StorageClass")?,
            namespace: daemon_set.namespace().context("the DaemonSet names no namespace")?,
            daemon_set: daemon_set.name_any(),
            pod_labels: pod_labels.join(","),
            containers: pod.containers.iter().map(|container| container.name.clone()).collect(),
        })
    }

    pub(super) fn class_name(&self) -> String {
        self.class.name_any()
    }

    pub(super) fn daemon_set(&self) -> &str {
        &self.daemon_set
    }

    pub(super) fn pod_labels(&self) -> &str {
        &self.pod_labels
    }

    pub(super) fn containers(&self) -> impl Iterator<Item = &str> {
        self.containers.iter().map(String::as_str)
    }
}

impl World<'_> {
    pub(super) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(super) fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(super) fn driver_pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.driver.namespace)
    }

    pub(super) fn daemon_sets(&self) -> Api<DaemonSet> {
        Api::namespaced(self.client.clone(), &self.driver.namespace)
    }

    /// The driver's pods that are not on their way out.
    pub(super) async fn live_driver_pods(&self) -> Result<Vec<Pod>> {
        let selected = ListParams::default().labels(self.driver.pod_labels());
        let pods =
            self.driver_pods().list(&selected).await.map_err(told).context("list the driver's pods")?;
        Ok(pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
    }
}
