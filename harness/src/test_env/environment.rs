//! The test environment of every story: the cluster, the driver as its manifests describe it, and the timeouts.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::{DaemonSet, StatefulSet};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::{Api, Client, ResourceExt};
use testvm::session::Session;
use testvm_cluster::manifests::is_kind;
use testvm_cluster::restarts::Caused;
use testvm_cluster::{Cluster, Node, objects};

use super::manifests::{self, Manifests};

/// The cluster under test and the driver in it.
pub(crate) struct TestEnv<'a> {
    pub(crate) client: Client,
    /// The cluster, if it is the harness's own, for faults of its control plane.
    pub(crate) cluster: Option<&'a Cluster>,
    /// The node, if it is the harness's own, for what the Kubernetes API does not show.
    pub(crate) node: Option<&'a Node>,
    pub(crate) manifests: Manifests,
    pub(crate) driver: Driver,
    /// The namespace of the claims and pods of the stories.
    pub(crate) namespace: String,
    pub(crate) timeouts: RunTimeouts,
    /// The directory in which stories store outputs, if the run has a report.
    pub(crate) reports: Option<PathBuf>,
    /// The restarts of the driver's containers that stories cause: [`super::disturbances`].
    pub(crate) caused: Caused,
}

/// The directory of the outputs of `loopfs doctor` in the reports of a run.
pub(crate) const DOCTOR: &str = "doctor";

/// The reason why a step that needs the node itself is skipped.
pub(crate) const FOREIGN_NODE: &str = "the node is not the harness's own: only the Kubernetes API reaches it";

/// Timeouts of waits for the cluster. Every wait ends with its condition, so a timeout is reached only on failure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// Until driver pods are ready, claims are bound, pods run.
    pub(crate) start: Duration,
    /// Until a claim is expanded. Without the driver, a block volume waits for the kubelet, which checks its size once in its sync
    /// period: a minute, and up to half a minute more.
    pub(crate) grow: Duration,
    /// Until pods and volumes are deleted.
    pub(crate) end: Duration,
}

impl Timeouts {
    /// The timeouts of runs that should pass. An emulated machine on a host that builds something is slow, and the kubelet's fourth
    /// attempt at a failing mount comes only after more than four minutes.
    pub(crate) const FULL: Timeouts = Timeouts {
        start: Duration::from_secs(600),
        grow: Duration::from_secs(600),
        end: Duration::from_secs(600),
    };
    /// The timeouts after a sabotage, where a longer wait would change nothing. A driver that is not disturbed needs less.
    const SHORT: Timeouts = Timeouts {
        start: Duration::from_secs(30),
        grow: Duration::from_secs(60),
        end: Duration::from_secs(30),
    };
}

/// The timeouts of a run, which a sabotage can shorten.
#[derive(Clone, Debug)]
pub(crate) struct RunTimeouts {
    full: Timeouts,
    is_short: Arc<AtomicBool>,
}

impl RunTimeouts {
    pub(crate) fn new(full: Timeouts) -> RunTimeouts {
        RunTimeouts { full, is_short: Arc::default() }
    }

    /// Shortens the timeouts of waits that begin from now on.
    pub(crate) fn shorten(&self) {
        self.is_short.store(true, Ordering::Relaxed);
    }

    /// Undoes [`shorten`](Self::shorten).
    pub(crate) fn restore(&self) {
        self.is_short.store(false, Ordering::Relaxed);
    }
}

impl Deref for RunTimeouts {
    type Target = Timeouts;

    fn deref(&self) -> &Timeouts {
        if self.is_short.load(Ordering::Relaxed) { &Timeouts::SHORT } else { &self.full }
    }
}

/// The driver, read from its manifests.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    pub(crate) name: String,
    pub(crate) class: StorageClass,
    namespace: String,
    daemon_set: String,
    pod_labels: String,
    containers: Vec<String>,
}

impl Driver {
    pub(crate) fn of(manifests: &Manifests) -> Result<Driver> {
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

    pub(crate) fn class_name(&self) -> String {
        self.class.name_any()
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(crate) fn daemon_set(&self) -> &str {
        &self.daemon_set
    }

    pub(crate) fn pod_labels(&self) -> &str {
        &self.pod_labels
    }

    pub(crate) fn containers(&self) -> impl Iterator<Item = &str> {
        self.containers.iter().map(String::as_str)
    }
}

impl<'a> TestEnv<'a> {
    pub(crate) fn new(
        manifests: Manifests,
        client: Client,
        cluster: Option<&'a Cluster>,
        namespace: &str,
    ) -> Result<TestEnv<'a>> {
        let driver = Driver::of(&manifests)?;
        let node = cluster.map(Cluster::node);
        let namespace = namespace.to_owned();
        let timeouts = RunTimeouts::new(Timeouts::FULL);
        let (reports, caused) = (None, Caused::default());
        Ok(TestEnv { client, cluster, node, manifests, driver, namespace, timeouts, reports, caused })
    }

    /// Returns the environment of another namespace, with the same cluster and driver. `name` is added to this namespace.
    pub(crate) fn in_other_namespace(&self, name: &str) -> Result<TestEnv<'a>> {
        let namespace = format!("{}-{name}", self.namespace);
        let other = TestEnv::new(self.manifests.clone(), self.client.clone(), self.cluster, &namespace)?;
        Ok(TestEnv { timeouts: self.timeouts.clone(), ..other })
    }

    /// Returns the environment of a run on a cluster, in this namespace.
    pub(crate) fn in_namespace(
        session: &Session,
        cluster: &'a Cluster,
        namespace: &str,
    ) -> Result<TestEnv<'a>> {
        TestEnv::new(manifests::of_driver(session)?, cluster.client().clone(), Some(cluster), namespace)
    }

    pub(crate) fn stateful_sets(&self) -> Api<StatefulSet> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn driver_pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.driver.namespace)
    }

    pub(crate) fn daemon_sets(&self) -> Api<DaemonSet> {
        Api::namespaced(self.client.clone(), &self.driver.namespace)
    }

    /// Returns the names of the driver's Deployments.
    pub(crate) fn deployments(&self) -> Vec<String> {
        let objects = self.manifests.objects().iter();
        objects.filter(|object| is_kind(object, "Deployment")).map(ResourceExt::name_any).collect()
    }

    /// Returns the driver's pods that are not being deleted.
    ///
    /// # Errors
    /// There is none. A step over no pods would pass without a check.
    pub(crate) async fn live_driver_pods(&self) -> Result<Vec<Pod>> {
        let pods = self.driver_pods_if_any().await?;
        anyhow::ensure!(!pods.is_empty(), "the driver has no pods");
        Ok(pods)
    }

    /// Returns the driver's pods that are not being deleted, of which there may be none.
    pub(crate) async fn driver_pods_if_any(&self) -> Result<Vec<Pod>> {
        let pods = objects::list(&self.driver_pods(), self.driver.pod_labels()).await?;
        Ok(pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
    }
}
