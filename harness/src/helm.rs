//! Helm, built from its Go module, and the chart of the checkout.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::TempDir;
use testvm::go_build::{self, GoModule, VersionVariable};
use testvm::process::Program;
use testvm::session::Session;
use testvm_cluster::KubernetesMinor;
use testvm_cluster::manifests::Manifests;

const HELM: GoModule = GoModule {
    version_variables: &[VersionVariable {
        variable: "helm.sh/helm/v3/internal/version.version",
        value: |version| version.to_string(),
    }],
    ..GoModule::new("helm", "helm.sh/helm/v3")
};

/// The name of the release whose objects have the names of csi/deploy.
pub(crate) const RELEASE: &str = "loopfs";
/// The namespace in which Helm records the release, which exists in every cluster.
const RELEASE_NAMESPACE: &str = "kube-system";

/// Returns `true` for the objects of the chart that Helm never deletes, by their kind and name.
pub(crate) fn is_kept(object: &str) -> bool {
    object.starts_with("Namespace ") || object.starts_with("CSIDriver ")
}

/// Helm with directories of its own, so that the settings of the user have no effect.
pub(crate) struct Helm {
    program: PathBuf,
    /// The directory of the chart in the checkout.
    pub(crate) chart: PathBuf,
    home: TempDir,
}

impl Helm {
    /// Builds Helm, or takes it from the cache.
    ///
    /// # Errors
    /// Go is missing, or the module cannot be fetched or built.
    pub(crate) async fn build(session: &Session) -> Result<Helm> {
        Ok(Helm {
            program: go_build::build(session, &HELM).await?.join("helm"),
            chart: session.workspace.root().join("csi").join("chart"),
            home: tempfile::tempdir().context("create a directory for Helm")?,
        })
    }

    /// Renders a release of a chart with these values for a release of Kubernetes.
    ///
    /// # Errors
    /// Helm refuses the values or the chart.
    pub(crate) async fn render(
        &self,
        release: &str,
        chart: &Path,
        values: &Value,
        kubernetes: KubernetesMinor,
    ) -> Result<Manifests> {
        let rendered = self.template(release, chart, values, kubernetes.name()).run().await?.stdout;
        Manifests::from_text(&rendered).with_context(|| format!("parse what Helm renders with {values}"))
    }

    /// Returns the message with which Helm refuses to render the chart with these values for a release of Kubernetes.
    ///
    /// # Errors
    /// Helm renders the chart.
    pub(crate) async fn refusal(&self, values: &Value, kubernetes: &str) -> Result<String> {
        let finished = self.template(RELEASE, &self.chart, values, kubernetes).finish().await?;
        anyhow::ensure!(!finished.status.success(), "Helm renders the chart with {values}");
        Ok(finished.stderr)
    }

    /// Packages the chart, and returns the path of the archive in `directory`.
    ///
    /// # Errors
    /// Helm fails, or writes no archive.
    pub(crate) async fn package(&self, directory: &Path) -> Result<PathBuf> {
        self.helm(&["package"]).arg(&self.chart).arg("--destination").arg(directory).run().await?;
        let archive = directory.join(format!("loopfs-{}.tgz", env!("CARGO_PKG_VERSION")));
        anyhow::ensure!(archive.exists(), "helm package did not write {}", archive.display());
        Ok(archive)
    }

    /// Installs a release of the chart on the cluster of a kubeconfig, or upgrades it to these values.
    ///
    /// # Errors
    /// Helm or the API server refuses the values.
    pub(crate) async fn install(&self, kubeconfig: &Path, release: &str, values: &Value) -> Result<()> {
        let program = self.helm(&["upgrade", "--install", release]).arg("--reset-values");
        self.apply(program, kubeconfig, values).await
    }

    /// Installs the chart over objects that exist and do not belong to a release.
    ///
    /// # Errors
    /// As [`Helm::install`], or there is a release.
    pub(crate) async fn take_ownership(&self, kubeconfig: &Path, values: &Value) -> Result<()> {
        self.apply(self.helm(&["install", RELEASE]).arg("--take-ownership"), kubeconfig, values).await
    }

    async fn apply(&self, command: Program, kubeconfig: &Path, values: &Value) -> Result<()> {
        let program = command.arg(&self.chart).args(["--namespace", RELEASE_NAMESPACE, "--values", "-"]);
        program.arg("--kubeconfig").arg(kubeconfig).input(values.to_string()).run().await.map(drop)
    }

    /// Uninstalls a release, and waits until its objects are deleted.
    ///
    /// # Errors
    /// Helm fails, or the objects are not deleted within five minutes.
    pub(crate) async fn uninstall(&self, kubeconfig: &Path, release: &str) -> Result<()> {
        let program = self.helm(&["uninstall", release, "--namespace", RELEASE_NAMESPACE]);
        let program = program.args(["--wait", "--timeout", "5m"]);
        program.arg("--kubeconfig").arg(kubeconfig).run().await.map(drop)
    }

    fn template(&self, release: &str, chart: &Path, values: &Value, kubernetes: &str) -> Program {
        // A helm that was not built by its makefile knows no release of Kubernetes.
        let program = self.helm(&["template", release]).arg(chart).args(["--kube-version", kubernetes]);
        // JSON is YAML.
        let program = program.args(["--namespace", RELEASE_NAMESPACE, "--values", "-"]);
        program.input(values.to_string())
    }

    fn helm(&self, command: &[&str]) -> Program {
        let program = Program::new(&self.program).args(command);
        ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"]
            .into_iter()
            .fold(program, |program, variable| program.env(variable, self.home.path()))
            .env_remove("HELM_NAMESPACE")
            .env_remove("KUBECONFIG")
    }
}
