//! The part of the apiserver lane that tests the Helm chart of the driver.
//!
//! The chart must render the objects of csi/deploy. For each option, a dry run shows whether the API server accepts the objects. The
//! control plane has no nodes, so no pod runs.

mod comparison;
mod options;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::manifests::is_kind;
use testvm_cluster::waiting::until_established;
use testvm_cluster::{ClusterProfile, ClusterSpec, ControlPlane, Durability, KubernetesMinor};

use self::comparison::{Objects, as_kept, as_shared_with_the_controller, differences, objects};
use self::options::{
    Accepted, NAMESPACES, accepted, all_components, merged, refused, second_driver, serves_mutating_policies,
};
use crate::helm::{Helm, RELEASE, is_kept};
use crate::test_env::manifests::{self, Manifests};

/// The word that selects this part with `--only`.
pub(super) const NAME: &str = "chart";

const SUITE: &str = "apiserver: chart";

/// The custom resources of the Prometheus operator that the chart can create.
const PROMETHEUS_OPERATOR: &str = include_str!("prometheus_operator.yaml");
/// The custom resources that objects of the chart need.
const CUSTOM_RESOURCES: [&str; 5] = [
    "podmonitors.monitoring.coreos.com",
    "prometheusrules.monitoring.coreos.com",
    "volumesnapshotclasses.snapshot.storage.k8s.io",
    "volumesnapshotcontents.snapshot.storage.k8s.io",
    "volumesnapshots.snapshot.storage.k8s.io",
];
/// The timeout until the API server serves them.
const ESTABLISHED_TIMEOUT: Duration = Duration::from_secs(60);

/// The component with which the controller, and not Helm, creates the classes.
const BUILTIN_OBJECTS: &str = "builtin-objects";

/// A release of Kubernetes that is too old for the driver.
const TOO_OLD: &str = "1.32";
/// A release of Kubernetes that the driver supports, and that is too old for the component claim-labels.
const TOO_OLD_FOR_CLAIM_LABELS: &str = "1.35";

/// The name of the release of a second driver.
const SECOND: &str = "second";
/// The names that no release changes: those of the programs, of labels, and of the Lease in the namespace of the driver.
const CONSTANT_NAMES: [&str; 5] = [
    "app.kubernetes.io/name\":\"loopfs-controller\"",
    "\"values\":[\"loopfs\",\"loopfs-controller\"]",
    "\"resourceNames\":[\"loopfs-controller\"]",
    "object.metadata.name == \\\"loopfs-controller\\\"",
    "orValue(\\\"\\\") == \\\"loopfs-provisioner\\\"",
];

/// The things that all checks use.
struct Fixture<'a> {
    root: &'a Path,
    helm: &'a Helm,
    control_plane: &'a ControlPlane,
    /// The release of Kubernetes for which Helm renders the chart.
    kubernetes: KubernetesMinor,
}

/// Runs all checks on a control plane of their own, which logs to `target/test/chart`.
///
/// # Errors
/// Helm cannot be built, or the control plane does not start or stop. Failed checks are in the report.
pub(super) async fn run(session: &Session, kubernetes: KubernetesMinor) -> Result<Report> {
    let helm = Helm::build(session).await?;
    let directory = tempfile::tempdir().context("create a directory for the control plane")?;
    let spec = ClusterSpec {
        dir: directory.path().to_owned(),
        logs: session.workspace.reports("test").join("chart"),
        durability: Durability::Unsafe,
        profile: ClusterProfile::Default,
    };
    let control_plane = ControlPlane::alone(session, &spec, kubernetes).await?;
    let step = session.progress.step("render the chart, and send its objects to the API server");
    let root = session.workspace.root();
    let fixture = Fixture { root, helm: &helm, control_plane: &control_plane, kubernetes };
    let mut report = Report::new();
    fixture.run(&mut report).await;
    report.end(step);
    // Also after a failure the control plane is stopped in order, so that its logs are complete.
    control_plane.stop().await?;
    Ok(report)
}

impl Fixture<'_> {
    async fn run(&self, report: &mut Report) {
        let enabled = json!({"enabled": true});
        let mut components = vec![
            (None, json!({})),
            (Some("node-loss"), json!({"components": {"nodeLoss": true}})),
            (Some("snapshots"), json!({"components": {"snapshots": true}})),
            (Some("resource-quota"), json!({"components": {"resourceQuota": true}})),
            (
                Some("monitoring"),
                json!({"monitoring": {"podMonitor": enabled, "prometheusRule": enabled, "networkPolicy": enabled}}),
            ),
            (Some(BUILTIN_OBJECTS), json!({"components": {"builtinObjects": true}})),
        ];
        if serves_mutating_policies(self.kubernetes) {
            components.push((Some("claim-labels"), json!({"components": {"claimLabels": true}})));
        }
        for (component, values) in components {
            let part = component.map_or("csi/deploy".to_owned(), |name| format!("the component {name}"));
            let name = format!("the chart renders the objects of {part}");
            report.run(SUITE, &name, self.same_as_deploy(component, &values)).await;
        }
        report.run(SUITE, "the chart renders snapshot-controller", self.snapshot_controller()).await;
        report.run(SUITE, "an archive of the chart renders the same objects", self.archive()).await;
        let name =
            "a release is installed, upgraded and uninstalled, and leaves the namespace and the CSIDriver";
        report.run(SUITE, name, self.install_and_uninstall()).await;
        report.run(SUITE, "two releases have no object in common", self.no_common_object()).await;
        report.run(SUITE, "two drivers are installed, and one is uninstalled", self.two_drivers()).await;
        report.run(SUITE, "create namespaces and custom resources for the dry runs", self.prepare()).await;
        for accepted in accepted(self.kubernetes) {
            let name = format!("the API server accepts {}", accepted.name);
            report.run(SUITE, &name, self.accepts(&accepted)).await;
        }
        for (values, named) in refused() {
            report.run(SUITE, &format!("Helm refuses {values}"), self.refuses(&values, None, named)).await;
        }
        let name = format!("Helm refuses Kubernetes {TOO_OLD}");
        report.run(SUITE, &name, self.refuses(&json!({}), Some(TOO_OLD), "kubeVersion")).await;
        let values = json!({"components": {"claimLabels": true}});
        let name = format!("Helm refuses {values} for Kubernetes {TOO_OLD_FOR_CLAIM_LABELS}");
        let refuses = self.refuses(&values, Some(TOO_OLD_FOR_CLAIM_LABELS), "components.claimLabels");
        report.run(SUITE, &name, refuses).await;
    }

    async fn rendered(&self, values: &Value) -> Result<Manifests> {
        self.helm.render(RELEASE, &self.helm.chart, values, self.kubernetes).await
    }

    /// Compares what the chart renders with csi/deploy and a component there.
    async fn same_as_deploy(&self, component: Option<&str>, values: &Value) -> Result<()> {
        let kubectl = self.control_plane.kubectl();
        let expected = match component {
            None => Manifests::render(kubectl, &self.root.join("csi").join("deploy")).await?,
            Some(component) => manifests::with_component(self.root, kubectl, component).await?,
        };
        let mut expected = objects(&expected)?;
        if component == Some(BUILTIN_OBJECTS) {
            as_shared_with_the_controller(&mut expected);
        }
        as_kept(&mut expected);
        same(&expected, &self.rendered(values).await?)
    }

    async fn snapshot_controller(&self) -> Result<()> {
        let kubectl = self.control_plane.kubectl();
        let mut expected = objects(&manifests::of_snapshot_controller(self.root, kubectl).await?)?;
        // If Helm deleted the custom resources with a release, the snapshots of all drivers would be deleted.
        expected.retain(|name, _| !name.starts_with("CustomResourceDefinition "));
        let all = self.rendered(&json!({"components": {"snapshotController": true}})).await?;
        same(&expected, &all.without(&self.rendered(&json!({})).await?))
    }

    async fn archive(&self) -> Result<()> {
        let directory = tempfile::tempdir().context("create a directory for the archive")?;
        let archive = self.helm.package(directory.path()).await?;
        let values = json!({"components": {"nodeLoss": true, "snapshots": true, "snapshotController": true}});
        let expected = objects(&self.rendered(&values).await?)?;
        same(&expected, &self.helm.render(RELEASE, &archive, &values, self.kubernetes).await?)
    }

    /// The second values add and remove objects. Nothing but Helm creates objects here, because no provisioner runs. The third values leave
    /// the namespace to the administrator, and Helm must not delete it.
    async fn install_and_uninstall(&self) -> Result<()> {
        let (client, kubeconfig) = (self.control_plane.client(), self.control_plane.kubeconfig());
        let first = json!({});
        let second = json!({
            "components": {
                "nodeLoss": true, "builtinObjects": true, "snapshotController": true,
                "claimLabels": serves_mutating_policies(self.kubernetes),
            },
            "monitoring": {"networkPolicy": {"enabled": true}},
        });
        let third = json!({"namespace": {"create": false}});
        let (before, after) = (self.rendered(&first).await?, self.rendered(&second).await?);
        let uids = async || -> Result<Vec<Option<String>>> {
            let namespace = Api::<Namespace>::all(client.clone()).get("loopfs-system").await?;
            let driver = Api::<CSIDriver>::all(client.clone()).get("csi.loopfs.dev").await?;
            Ok(vec![namespace.uid(), driver.uid()])
        };
        let mut kept = None;
        for (what, values, present, absent) in [
            ("install the chart", &first, &before, after.without(&before)),
            ("upgrade the release to more components", &second, &after, before.without(&after)),
            ("upgrade the release to the defaults", &first, &before, after.without(&before)),
            ("upgrade the release to an existing namespace", &third, &before, after.without(&before)),
            ("upgrade the release to its own namespace again", &first, &before, after.without(&before)),
        ] {
            self.helm.install(&kubeconfig, RELEASE, values).await.context(what)?;
            self.require_all(present, what).await?;
            let existing = absent.existing(client).await?;
            anyhow::ensure!(existing.is_empty(), "{what}: {existing:?} exist and must not");
            let uids = Some(uids().await.context(what)?);
            anyhow::ensure!(
                kept.is_none() || kept == uids,
                "{what}: the namespace or the CSIDriver was replaced"
            );
            kept = uids;
        }
        self.helm.uninstall(&kubeconfig, RELEASE).await.context("uninstall the release")?;
        for rendered in [before, after] {
            let mut existing = rendered.existing(client).await?;
            existing.retain(|object| !is_kept(object));
            anyhow::ensure!(existing.is_empty(), "after the release was uninstalled, {existing:?} exist");
        }
        let uids = Some(uids().await.context("after the release was uninstalled")?);
        anyhow::ensure!(
            kept == uids,
            "the release was uninstalled: the namespace or the CSIDriver was replaced"
        );
        Ok(())
    }

    /// Checks that all objects of a release exist.
    async fn require_all(&self, rendered: &Manifests, what: &str) -> Result<()> {
        let existing = rendered.existing(self.control_plane.client()).await?;
        let count = rendered.objects().len();
        anyhow::ensure!(existing.len() == count, "{what}: of {count} objects only these exist: {existing:?}");
        Ok(())
    }

    /// Helm would refuse the second release if it had an object of the first, but not a reference to one, such as the role of a binding.
    async fn no_common_object(&self) -> Result<()> {
        let all = all_components(serves_mutating_policies(self.kubernetes));
        let first = objects(&self.rendered(&all).await?)?;
        let second = merged(&second_driver(), &all);
        let second = self.helm.render(SECOND, &self.helm.chart, &second, self.kubernetes).await?;
        let names = objects(&second)?;
        let common: Vec<&String> = first.keys().filter(|name| names.contains_key(*name)).collect();
        anyhow::ensure!(common.is_empty(), "both releases have {common:?}");
        // The annotations of the alert rules are text for people.
        let others = second.objects().iter().filter(|object| !is_kind(object, "PrometheusRule"));
        let others: Vec<_> = others.collect();
        let text = serde_json::to_string(&others)?;
        let text = CONSTANT_NAMES.iter().fold(text, |text, constant| text.replace(constant, ""));
        let references = names_of_the_first(&text);
        anyhow::ensure!(references.is_empty(), "the second release refers to {references:?}");
        Ok(())
    }

    async fn two_drivers(&self) -> Result<()> {
        let kubeconfig = self.control_plane.kubeconfig();
        let values = second_driver();
        let first = self.rendered(&json!({})).await?;
        let second = self.helm.render(SECOND, &self.helm.chart, &values, self.kubernetes).await?;
        self.helm.install(&kubeconfig, RELEASE, &json!({})).await.context("install the first driver")?;
        let shared = merged(&json!({"dataDir": "/var/lib/loopfs/data"}), &values);
        let refusal = self.helm.install(&kubeconfig, SECOND, &shared).await.err();
        let refusal = refusal.context("Helm installs two drivers with one data directory")?;
        let message = format!("{refusal:#}");
        anyhow::ensure!(message.contains("two drivers cannot share"), "the refusal is {message}");
        self.helm.install(&kubeconfig, SECOND, &values).await.context("install the second driver")?;
        self.require_all(&first, "beside the second driver").await?;
        self.require_all(&second, "beside the first driver").await?;
        self.helm.uninstall(&kubeconfig, SECOND).await.context("uninstall the second driver")?;
        self.require_all(&first, "after the second driver was uninstalled").await?;
        self.helm.uninstall(&kubeconfig, RELEASE).await.context("uninstall the first driver")
    }

    async fn prepare(&self) -> Result<()> {
        let client = self.control_plane.client();
        Manifests::from_text(PROMETHEUS_OPERATOR)?.apply(client).await?;
        for name in NAMESPACES {
            let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            Manifests::from_text(&namespace.to_string())?.apply(client).await?;
        }
        let directory = self.root.join("csi").join("deploy").join("snapshot-controller");
        let files = ["volumesnapshotclasses", "volumesnapshotcontents", "volumesnapshots"];
        let files = files.map(|name| directory.join(format!("{name}.yaml")));
        Manifests::read_files(&files)?.apply(client).await?;
        until_established(client, &CUSTOM_RESOURCES, ESTABLISHED_TIMEOUT).await
    }

    async fn accepts(&self, accepted: &Accepted) -> Result<()> {
        let rendered = self.rendered(&accepted.values).await?;
        let text = serde_json::to_string(rendered.objects())?;
        for present in accepted.present {
            anyhow::ensure!(text.contains(present), "the objects do not contain {present}");
        }
        for absent in accepted.absent {
            anyhow::ensure!(!text.contains(absent), "the objects contain {absent}");
        }
        let found = rendered.objects().iter().filter(|object| is_kind(object, "DaemonSet"));
        let mut found: Vec<String> = found.map(ResourceExt::name_any).collect();
        found.sort();
        anyhow::ensure!(found == accepted.daemon_sets, "the DaemonSets are {found:?}");
        rendered.dry_run(self.control_plane.client()).await
    }

    async fn refuses(&self, values: &Value, kubernetes: Option<&str>, named: &str) -> Result<()> {
        let kubernetes = kubernetes.unwrap_or(self.kubernetes.name());
        let message = self.helm.refusal(values, kubernetes).await?;
        anyhow::ensure!(message.contains(named), "the message does not name {named}: {message}");
        Ok(())
    }
}

/// Returns the names of the first release in a text, which do not follow a prefix or a directory.
fn names_of_the_first(text: &str) -> Vec<&str> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '-';
    let begins = text.match_indices("loopfs-").map(|(begin, _)| begin);
    let begins = begins.filter(|begin| !text[..*begin].ends_with(|before| is_part(before) || before == '/'));
    begins.filter_map(|begin| text[begin..].split(|character| !is_part(character)).next()).collect()
}

fn same(expected: &Objects, found: &Manifests) -> Result<()> {
    let differences = differences(expected, &objects(found)?);
    anyhow::ensure!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::names_of_the_first;

    /// The names of another release begin with its own prefix.
    #[test]
    fn names_of_other_releases_are_ignored() {
        let text = r#"["/loopfs-csi", "second-loopfs-a", ":loopfs-(b|c)$", "loopfs-d.e"]"#;
        assert_eq!(names_of_the_first(text), ["loopfs-", "loopfs-d"]);
    }
}
