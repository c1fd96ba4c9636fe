//! The part of the apiserver lane in which two versions of the driver run side by side: the earlier one, from before the controller
//! existed, on one node, and the present one on another node and as the controller.
//!
//! During a roll-out, the manifests replace the rights of the provisioners' account before the first pod is replaced. The earlier version
//! therefore runs with the rights of the present one, which do not suffice to place Immediate claims. On the way back, it has its own
//! rights again. It and the controller then both place them.
//!
//! Each provisioner has its volumes in memory. The version that replaces another one on a node therefore begins with an empty store. The
//! part upgrade of the lane extended tests what it does with the volumes of the other one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::{try_join, try_join_all};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod, PodSpec};
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use testvm::process::{Process, Program};
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::ControlPlane;
use testvm_cluster::api_error::api_error;
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until, until_event, until_one};
use testvm_cluster::workload::{self, VolumeMode, create_namespace};

use crate::earlier::earlier_live_tests;
use crate::fake_nodes::{self, CONTROLLER, LiveTests, NODES, ROLE, SYSTEM};
use crate::test_env::claim_labels::{LABEL, until_recorded};
use crate::test_env::claims::{SELECTED_NODE, is_bound, request_size, until_expanded, with_selected_node};
use crate::test_env::manifests::{self, Manifests};
use crate::test_env::sizes::Size;
use crate::test_env::workload::claim;

/// The word that selects this part with `--only`.
pub(super) const NAME: &str = "side";

pub(super) const SUITE: &str = "apiserver: two versions";
const NAMESPACE: &str = "two-versions";
/// The StorageClass of the manifests, which is copied for Immediate claims.
const CLASS: &str = "loopfs";

/// The node on which the earlier version runs, and the one on which the present version runs.
const A: &str = NODES[0];
const B: &str = NODES[1];

/// The number of claims of a batch for each node and each volumeBindingMode.
const BATCH: usize = 4;
const SIZE: Size = Size::mebibytes(1);
const EXPANDED: Size = Size::mebibytes(4);
const EXPANDED_AGAIN: Size = Size::mebibytes(8);
/// The size of the last claim of the earlier version, which no other change of the free capacity equals.
const LAST_SIZE: Size = Size::mebibytes(512);
const LARGER_THAN_STORE: Size = Size::mebibytes(2 * STORE_MEBIBYTES);

/// The size of the store of each provisioner: 1 PiB.
const STORE_MEBIBYTES: u64 = 1 << 30;

/// The timeout of the work on claims. A provisioner retries after some seconds if it was not permitted to place a claim.
const TIMEOUT: Duration = Duration::from_secs(180);
/// Limits the shutdown of a process that completes operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// A part of the message with which the earlier version logs that it deleted a second volume for a claim.
const DUPLICATE: &str = "because another node created one for the same claim";

/// Runs the part on a control plane with the driver. `logs` is the directory of its logs.
pub(super) async fn run(
    session: &Session,
    tests: &LiveTests,
    control_plane: &ControlPlane,
    logs: &Path,
) -> Result<Report> {
    let client = control_plane.client().clone();
    let claims = Api::namespaced(client.clone(), NAMESPACE);
    let labels = manifests::of_claim_labels(session)?;
    let scene = Scene { tests, control_plane, client, claims, labels, logs };
    let mut report = Report::new();
    // After a failure, the report says which step failed.
    let _completed = Box::pin(scene.run(&mut Steps::begin(session, &mut report, SUITE))).await;
    Ok(report)
}

/// The earlier version.
struct Earlier {
    /// Its live tests, with the token of its pod.
    tests: LiveTests,
    manifests: Manifests,
}

/// A process with one role of the driver. Dropping it kills the process.
struct Running {
    process: Process,
    log: PathBuf,
    /// The PersistentVolumes of its node that are older than its store.
    older: BTreeSet<String>,
}

impl Running {
    /// Stops the process, and returns the volumes in its store. The earlier version names none.
    async fn stop(self) -> Result<BTreeSet<String>> {
        let name = self.process.name().to_owned();
        let status = self.process.stop(STOP_GRACE).await?;
        let log = self.log.display();
        anyhow::ensure!(status.success(), "{name} did not exit cleanly: {status}; see {log}");
        let text = std::fs::read_to_string(&self.log).with_context(|| format!("read {log}"))?;
        anyhow::ensure!(!text.contains(DUPLICATE), "{name} had a second volume for a claim; see {log}");
        Ok(fake_nodes::stored_volumes(&self.log)?.into_iter().collect())
    }
}

/// A claim of one of the nodes.
struct NodeClaim {
    name: String,
    node: &'static str,
    /// If `false`, the scheduler has selected the node.
    is_immediate: bool,
    size: Size,
}

impl NodeClaim {
    fn selected(name: &str, node: &'static str) -> NodeClaim {
        NodeClaim { name: name.to_owned(), node, is_immediate: false, size: SIZE }
    }

    fn immediate(name: &str, node: &'static str) -> NodeClaim {
        NodeClaim { name: name.to_owned(), node, is_immediate: true, size: SIZE }
    }

    /// Returns claims of both volumeBindingModes for both nodes. Their names begin with `prefix`.
    fn batch(prefix: &str) -> Vec<NodeClaim> {
        let of_node = |node| {
            (0..BATCH).flat_map(move |number| {
                [
                    NodeClaim::selected(&format!("{prefix}-selected-{node}-{number}"), node),
                    NodeClaim::immediate(&format!("{prefix}-immediate-{node}-{number}"), node),
                ]
            })
        };
        NODES.into_iter().flat_map(of_node).collect()
    }

    fn object(&self) -> Result<PersistentVolumeClaim> {
        let class = if self.is_immediate { class_of(self.node) } else { CLASS.to_owned() };
        let claim = claim(&self.name, &class, self.size, VolumeMode::Filesystem, "ReadWriteOnce")?;
        Ok(if self.is_immediate { claim } else { with_selected_node(claim, self.node) })
    }
}

/// Returns the name of the Immediate class whose volumes are on a node.
fn class_of(node: &str) -> String {
    format!("{NAMESPACE}-{node}")
}

struct Scene<'a> {
    tests: &'a LiveTests,
    control_plane: &'a ControlPlane,
    client: Client,
    claims: Api<PersistentVolumeClaim>,
    /// The objects of the component claim-labels.
    labels: Manifests,
    logs: &'a Path,
}

impl Scene<'_> {
    async fn run(&self, steps: &mut Steps<'_>) -> StepResult {
        let title = "the provisioner of the earlier version is built, and has a pod on its node";
        let earlier = steps.step(title, self.prepare(steps.session())).await?;
        let title = "the earlier version creates a volume with the rights of the present version";
        let on_a = steps.step(title, self.start_roll_out(&earlier)).await?;
        let title = "while no controller runs, an Immediate claim waits, and the earlier version reports the right that it lacks";
        steps.step(title, self.wait_for_controller()).await?;
        let title =
            "the claims that wait get their volumes as soon as the present version runs on the other node";
        let (controller, on_b) = steps.step(title, self.continue_roll_out()).await?;
        let title = "claims are served side by side, each with one volume on its node";
        steps.step(title, self.serve_batch("both")).await?;
        steps.step("claims are expanded and deleted on both nodes", self.expand_and_delete("both")).await?;
        let title =
            "a claim that the earlier version returns to the scheduler is selected again by the controller";
        steps.step(title, self.return_to_scheduler()).await?;
        let title = "the claims of both versions are labelled, and later claims get their volumes";
        steps.step(title, self.rely_on_labels()).await?;
        let title = "the present version replaces the earlier one, and has one volume for each later claim";
        steps.step(title, self.replace(on_a)).await?;
        let title =
            "while no controller runs, the earlier version with its own rights places Immediate claims";
        let on_a = steps.step(title, self.go_back(&earlier, controller)).await?;
        let title = "the earlier version and the controller place the same Immediate claims, and each gets one volume";
        let controller = steps.step(title, self.place_twice()).await?;
        let title = "all processes exit cleanly, and no node has a second volume for a claim";
        steps.step(title, self.stop(on_a, controller, on_b)).await
    }

    /// Builds the earlier version, and creates its pod and what the claims need.
    async fn prepare(&self, session: &Session) -> Result<Earlier> {
        create_namespace(&self.client, NAMESPACE).await?;
        for node in NODES {
            self.create_class(node).await?;
        }
        let earlier = earlier_live_tests(session).await?;
        let manifests = manifests::of_checkout(&earlier.checkout)?;
        let daemon_set: DaemonSet = manifests.only("DaemonSet")?;
        let spec = daemon_set.spec.and_then(|spec| spec.template.spec).context("a DaemonSet without pods")?;
        let pod = Pod {
            // The earlier version takes the first pod on its node for its own.
            metadata: kube::core::ObjectMeta {
                name: Some("earlier-version".to_owned()),
                ..Default::default()
            },
            spec: Some(PodSpec { node_name: Some(A.to_owned()), ..spec }),
            status: None,
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let pod = objects::create(&pods, &pod).await?;
        let written = self.control_plane.kubeconfig_of_pod(&pod, "earlier-version").await?;
        let kubeconfigs = written.with_extension("");
        std::fs::create_dir(&kubeconfigs)
            .and_then(|()| std::fs::rename(&written, fake_nodes::kubeconfig(&kubeconfigs, A)))
            .context("move the kubeconfig of the earlier version")?;
        let tests = LiveTests::new(earlier.program, self.control_plane, &kubeconfigs);
        Ok(Earlier { tests, manifests })
    }

    /// The first step of a roll-out: the manifests of the present version are applied, and the pods are still those of the earlier one.
    async fn start_roll_out(&self, earlier: &Earlier) -> Result<Running> {
        let on_a = self.start_earlier(earlier, "roll-out").await?;
        self.serve(&[NodeClaim::selected("early-a", A)]).await?;
        Ok(on_a)
    }

    async fn wait_for_controller(&self) -> Result<()> {
        // No provisioner runs on the node of the first claim yet.
        let waiting = [NodeClaim::selected("early-b", B), NodeClaim::immediate("waiting", A)];
        self.create(&waiting).await?;
        let claim = objects::read(&self.claims, "waiting").await?;
        let lacks = |message: &str| message.contains("cannot list resource \"csinodes\"");
        until_event(&self.client, &claim, &["ProvisioningFailed"], TIMEOUT, lacks).await?;
        Ok(())
    }

    /// Adds the component claim-labels, and starts the controller and the provisioner of the other node.
    async fn continue_roll_out(&self) -> Result<(Running, Running)> {
        self.labels.apply(&self.client).await?;
        let controller = self.start_present(CONTROLLER, "roll-out").await?;
        let on_b = self.start_present(B, "roll-out").await?;
        self.until_served(&[NodeClaim::selected("early-b", B), NodeClaim::immediate("waiting", A)]).await?;
        Ok((controller, on_b))
    }

    async fn expand_and_delete(&self, batch: &str) -> Result<()> {
        try_join(self.expand("early-a", EXPANDED), self.expand("early-b", EXPANDED)).await?;
        try_join_all(NodeClaim::batch(batch).iter().map(|claim| self.delete(&claim.name))).await?;
        Ok(())
    }

    /// The earlier version returns a claim to the scheduler if its node cannot hold the volume. The present version knows that this
    /// does not help an Immediate claim.
    async fn return_to_scheduler(&self) -> Result<()> {
        const TOO_LARGE: &str = "too-large";
        self.create(&[NodeClaim { size: LARGER_THAN_STORE, ..NodeClaim::immediate(TOO_LARGE, A) }]).await?;
        let claim = objects::read(&self.claims, TOO_LARGE).await?;
        let is_returned = |message: &str| message.contains("returned the claim to the scheduler");
        until_event(&self.client, &claim, &["ProvisioningFailed"], TIMEOUT, is_returned).await?;
        let selected = until_one(self.claims.clone(), TOO_LARGE, TIMEOUT, |claim| {
            let selected = claim.and_then(|claim| claim.annotations().get(SELECTED_NODE));
            State::ready_if(selected.is_some_and(|node| node == A), "no node is selected")
        });
        selected.await?;
        objects::delete(&self.claims, TOO_LARGE).await
    }

    /// Waits until the nodes may rely on the labels, and uses claims from before and after.
    async fn rely_on_labels(&self) -> Result<()> {
        until_recorded(&self.client, SYSTEM, true).await?;
        for (claim, node) in [("early-a", A), ("early-b", B), ("waiting", A)] {
            let found = objects::read(&self.claims, claim).await?;
            let label = found.labels().get(LABEL);
            anyhow::ensure!(
                label.is_some_and(|label| label == node),
                "claim {claim} has the label {label:?}, and its volume is on {node}"
            );
        }
        self.serve_batch("labelled").await?;
        try_join(self.expand("early-b", EXPANDED_AGAIN), self.delete("waiting")).await?;
        Ok(())
    }

    /// The second step of the roll-out: the present version replaces the earlier one on its node.
    async fn replace(&self, earlier: Running) -> Result<()> {
        self.stop_earlier(earlier, "roll-out").await?;
        let present = self.start_present(A, "roll-out").await?;
        self.serve_batch("replaced").await?;
        self.delete("early-a").await?;
        self.stop_present(present, A).await
    }

    /// The first steps of the way back: the controller is deleted, and the node of the earlier version has the rights of that version.
    async fn go_back(&self, earlier: &Earlier, controller: Running) -> Result<Running> {
        controller.stop().await?;
        let role: ClusterRole = earlier.manifests.only("ClusterRole")?;
        let apply = PatchParams::apply("side-by-side").force();
        let roles: Api<ClusterRole> = Api::all(self.client.clone());
        roles
            .patch(&role.name_any(), &apply, &Patch::Apply(&role))
            .await
            .map_err(api_error)
            .context("apply the ClusterRole of the earlier version")?;
        let on_a = self.start_earlier(earlier, "way-back").await?;
        self.serve(&[NodeClaim::selected("back-a", A), NodeClaim::immediate("alone", A)]).await?;
        let alone = objects::read(&self.claims, "alone").await?;
        let selected = alone.annotations().get(SELECTED_NODE);
        anyhow::ensure!(selected.is_none(), "claim alone has the selected node {selected:?}");
        Ok(on_a)
    }

    /// Starts the controller again, and has it and the earlier version place the same claims.
    async fn place_twice(&self) -> Result<Running> {
        let controller = self.start_present(CONTROLLER, "way-back").await?;
        // The earlier version does not run on this node, so the controller has placed this claim, and now leads.
        self.serve(&[NodeClaim::immediate("leads", B)]).await?;
        self.serve_batch("twice").await?;
        // The earlier version placed this claim without the annotation that the API server copies into the label.
        let labelled = until_one(self.claims.clone(), "alone", TIMEOUT, |claim| {
            let label = claim.and_then(|claim| claim.labels().get(LABEL));
            State::ready_if(label.is_some_and(|label| label == A), format!("its label is {label:?}"))
        });
        labelled.await.context("claim alone is not labelled")?;
        try_join(self.expand("alone", EXPANDED), self.delete("back-a")).await?;
        Ok(controller)
    }

    async fn stop(&self, on_a: Running, controller: Running, on_b: Running) -> Result<()> {
        self.stop_earlier(on_a, "way-back").await?;
        controller.stop().await?;
        self.stop_present(on_b, B).await
    }

    async fn start_earlier(&self, earlier: &Earlier, stage: &str) -> Result<Running> {
        let program =
            earlier.tests.serving(fake_nodes::SERVE).named("the provisioner of the earlier version");
        self.start(program, A, &format!("earlier-{stage}")).await
    }

    /// Starts the provisioner of a node, or the controller.
    async fn start_present(&self, role: &str, stage: &str) -> Result<Running> {
        let program = self.tests.serving(fake_nodes::SERVE_ROLE).env(ROLE, role);
        let program = program.named(&format!("the present version for {role}"));
        self.start(program, role, &format!("{role}-{stage}")).await
    }

    async fn start(&self, program: Program, role: &str, log: &str) -> Result<Running> {
        let log = self.logs.join(format!("side-by-side-{log}.log"));
        let older = self.volumes_on(role).await?.into_iter().map(|volume| volume.name).collect();
        let process = program.env("LOG_LEVEL", "info").log(&log).spawn()?;
        Ok(Running { process, log, older })
    }

    /// Waits until the earlier version publishes the free capacity of a store with exactly the volumes of its PersistentVolumes, and
    /// stops it.
    async fn stop_earlier(&self, earlier: Running, stage: &str) -> Result<()> {
        // A capacity that was published earlier does not include this claim.
        let last = NodeClaim { size: LAST_SIZE, ..NodeClaim::selected(&format!("last-{stage}"), A) };
        self.serve(&[last]).await?;
        let volumes = self.volumes_since(&earlier, A).await?;
        let used: u64 = volumes.iter().map(|volume| volume.mebibytes).sum();
        let expected = Quantity(format!("{}Mi", STORE_MEBIBYTES - used));
        let capacities: Api<CSIStorageCapacity> = Api::namespaced(self.client.clone(), SYSTEM);
        let on_a = watcher::Config::default().labels(&format!("{LABEL}={A}"));
        let published = until(capacities, on_a, TIMEOUT, |capacities| {
            let of_class = capacities.values().find(|capacity| capacity.storage_class_name == CLASS);
            let capacity = of_class.and_then(|of_class| of_class.capacity.as_ref());
            let pending = format!("the free capacity is {capacity:?}, not {expected:?}");
            State::ready_if(capacity == Some(&expected), pending)
        });
        let count = volumes.len();
        published
            .await
            .with_context(|| format!("{A} has other volumes than its {count} PersistentVolumes"))?;
        earlier.stop().await.map(drop)
    }

    /// Stops the provisioner of a node. Checks that it has exactly the volumes of its PersistentVolumes.
    async fn stop_present(&self, present: Running, node: &str) -> Result<()> {
        let volumes = self.volumes_since(&present, node).await?;
        let expected: BTreeSet<String> = volumes.into_iter().map(|volume| volume.name).collect();
        let stored = present.stop().await?;
        anyhow::ensure!(
            stored == expected,
            "{node} has the volumes {stored:?}, and its PersistentVolumes are {expected:?}"
        );
        Ok(())
    }

    /// Creates an Immediate class whose volumes are on one node.
    async fn create_class(&self, node: &str) -> Result<()> {
        let classes: Api<StorageClass> = Api::all(self.client.clone());
        let class = objects::read(&classes, CLASS).await?;
        let topology = json!([{"matchLabelExpressions": [
            {"key": format!("topology.{}/node", class.provisioner), "values": [node]},
        ]}]);
        let of_node = StorageClass {
            metadata: kube::core::ObjectMeta { name: Some(class_of(node)), ..Default::default() },
            volume_binding_mode: Some("Immediate".to_owned()),
            allowed_topologies: Some(serde_json::from_value(topology)?),
            ..class
        };
        objects::create(&classes, &of_node).await.map(drop)
    }

    async fn serve_batch(&self, prefix: &str) -> Result<()> {
        self.serve(&NodeClaim::batch(prefix)).await
    }

    /// Creates claims concurrently, and waits until each has its only volume.
    async fn serve(&self, claims: &[NodeClaim]) -> Result<()> {
        self.create(claims).await?;
        Box::pin(self.until_served(claims)).await
    }

    async fn create(&self, claims: &[NodeClaim]) -> Result<()> {
        let objects: Vec<PersistentVolumeClaim> =
            claims.iter().map(NodeClaim::object).collect::<Result<_>>()?;
        try_join_all(objects.iter().map(|object| objects::create(&self.claims, object))).await?;
        Ok(())
    }

    /// Waits until the claims are bound. Checks that each has one PersistentVolume, and that only its node has created a volume for it.
    async fn until_served(&self, claims: &[NodeClaim]) -> Result<()> {
        let bound = until(self.claims.clone(), watcher::Config::default(), TIMEOUT, |found| {
            let bound: BTreeSet<String> =
                found.values().filter(|claim| is_bound(claim)).map(ResourceExt::name_any).collect();
            let waiting: Vec<&String> =
                claims.iter().map(|claim| &claim.name).filter(|name| !bound.contains(*name)).collect();
            State::ready_if(waiting.is_empty(), format!("claims {waiting:?} are not bound"))
        });
        bound.await?;
        let nodes: BTreeMap<&str, &str> =
            claims.iter().map(|claim| (claim.name.as_str(), claim.node)).collect();
        let volumes = self.volumes().await?;
        for (claim, node) in &nodes {
            let of_claim: Vec<&str> =
                volumes.iter().filter(|volume| volume.claim == *claim).map(|volume| &*volume.node).collect();
            anyhow::ensure!(of_claim == [*node], "claim {claim} of {node} has volumes on {of_claim:?}");
        }
        self.check_events(&nodes).await
    }

    /// Checks the events in which a provisioner reports that it begins to create a volume. `nodes` has the node of each claim.
    async fn check_events(&self, nodes: &BTreeMap<&str, &str>) -> Result<()> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        let reporters = |events: &BTreeMap<String, Event>| -> BTreeSet<(String, String)> {
            let began = events.values().filter(|event| event.reason.as_deref() == Some("Provisioning"));
            began
                .filter_map(|event| {
                    Some((event.involved_object.name.clone()?, event.reporting_instance.clone()?))
                })
                .filter(|(claim, _node)| nodes.contains_key(claim.as_str()))
                .collect()
        };
        let written = until(events, watcher::Config::default(), TIMEOUT, |events| {
            let reporters = reporters(events);
            let missing: Vec<&str> = nodes
                .keys()
                .copied()
                .filter(|claim| !reporters.iter().any(|(of_claim, _)| of_claim == claim))
                .collect();
            State::ready_if(missing.is_empty(), format!("no provisioner reports about {missing:?}"))
        });
        let expected: BTreeSet<(String, String)> =
            nodes.iter().map(|(claim, node)| ((*claim).to_owned(), (*node).to_owned())).collect();
        let reporters = reporters(&written.await?);
        let unexpected: Vec<_> = reporters.difference(&expected).collect();
        anyhow::ensure!(unexpected.is_empty(), "other nodes began to create volumes: {unexpected:?}");
        Ok(())
    }

    async fn expand(&self, claim: &str, size: Size) -> Result<()> {
        request_size(&self.claims, claim, size).await?;
        // Boxed, like other waits here: cases have several of them, and a watch is large.
        Box::pin(until_expanded(self.claims.clone(), claim, size, TIMEOUT)).await
    }

    async fn delete(&self, claim: &str) -> Result<()> {
        Box::pin(workload::delete_claim(&self.client, &self.claims, claim, TIMEOUT)).await
    }

    /// Returns the PersistentVolumes of a node that are not older than the store of its provisioner.
    async fn volumes_since(&self, provisioner: &Running, node: &str) -> Result<Vec<Volume>> {
        let mut volumes = self.volumes_on(node).await?;
        volumes.retain(|volume| !provisioner.older.contains(&volume.name));
        anyhow::ensure!(!volumes.is_empty(), "the provisioner of {node} has no PersistentVolume");
        Ok(volumes)
    }

    async fn volumes_on(&self, node: &str) -> Result<Vec<Volume>> {
        let mut volumes = self.volumes().await?;
        volumes.retain(|volume| volume.node == node);
        Ok(volumes)
    }

    /// Returns the PersistentVolumes of the claims of this part.
    async fn volumes(&self) -> Result<Vec<Volume>> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let volumes = objects::list(&volumes, "").await?;
        let of_this_part = volumes.iter().filter(|volume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            claim.and_then(|claim| claim.namespace.as_deref()) == Some(NAMESPACE)
        });
        of_this_part.map(Volume::of).collect()
    }
}

/// A PersistentVolume.
struct Volume {
    name: String,
    node: String,
    /// The name of its claim.
    claim: String,
    mebibytes: u64,
}

impl Volume {
    fn of(volume: &PersistentVolume) -> Result<Volume> {
        let name = volume.name_any();
        let spec = volume.spec.as_ref();
        let claim = spec.and_then(|spec| spec.claim_ref.as_ref()?.name.clone());
        let capacity = spec.and_then(|spec| spec.capacity.as_ref()?.get("storage"));
        let mebibytes = capacity.and_then(|capacity| capacity.0.strip_suffix("Mi")?.parse().ok());
        Ok(Volume {
            node: volume.labels().get(LABEL).cloned().with_context(|| format!("{name} has no node"))?,
            claim: claim.with_context(|| format!("{name} has no claim"))?,
            mebibytes: mebibytes.with_context(|| format!("{name} has the capacity {capacity:?}"))?,
            name,
        })
    }
}
