//! The programs of the end-to-end tests, and a run of them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::go_build::{self, GoModule, pinned_version};
use testvm::process::{Process, Program};
use testvm::session::Session;

use super::images;
use crate::components::flag;
use crate::programs::{conformance, kubernetes};
use crate::release::KubernetesMinor;

/// The package of the end-to-end tests.
const E2E: &str = "k8s.io/kubernetes/test/e2e";
/// The file in the directory of a run with the result of every spec, as Ginkgo writes it.
pub const REPORT: &str = "report.json";
/// The file in the directory of a run with the output of the specs.
const LOG: &str = "ginkgo.log";
/// The order of the specs is the same in each run.
const SEED: u32 = 1;

/// The name of no file. Tests that log in to nodes by SSH skip themselves without a key, and must not find one of the user's.
const NO_KEY: &str = "no-ssh-key";

/// The end-to-end tests of Kubernetes, built.
#[derive(Clone, Debug)]
pub struct Suite {
    e2e: PathBuf,
    ginkgo: PathBuf,
    agnhost: PathBuf,
    sources: PathBuf,
}

/// The cluster on which specs run.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The kubeconfig of an administrator.
    pub kubeconfig: &'a Path,
    /// A kubectl of the version of the cluster.
    pub kubectl: &'a Path,
    /// The definition of the driver under test, for `External.Storage`.
    pub driver: &'a Path,
}

/// The specs of one run.
#[derive(Clone, Debug)]
pub struct Specs {
    /// The number of specs that run concurrently.
    pub processes: usize,
    /// Regular expressions, one of which matches the text of each spec.
    pub focus: Vec<String>,
    /// Regular expressions, none of which matches the text of a spec.
    pub skip: Vec<String>,
    /// A condition for the labels of each spec, such as `!Serial`. See
    /// <https://onsi.github.io/ginkgo/#spec-labels>.
    pub labels: String,
    /// The time after which specs in progress are interrupted, and no more are started. They are reported.
    pub timeout: Duration,
}

impl Suite {
    /// Builds the programs for a cluster of this minor release, or takes them from the cache.
    ///
    /// # Errors
    /// Go is missing, the programs do not compile, no `go.mod` pins the tests of this release, or it pins those of another
    /// patch release than the clusters run.
    pub async fn build(session: &Session, minor: KubernetesMinor) -> Result<Suite> {
        let module = module(minor)?;
        require_same_release(session, &module, &kubernetes(minor))?;
        let e2e = go_build::build_tests(session, &module, E2E).await?;
        let programs = go_build::build(session, &module).await?;
        let sources = go_build::sources(session, &module, module.versioned_by).await?.directory;
        Ok(Suite { e2e, ginkgo: programs.join("ginkgo"), agnhost: programs.join("agnhost"), sources })
    }

    /// Returns the directory of the sources of Kubernetes.
    #[must_use]
    pub fn sources(&self) -> &Path {
        &self.sources
    }

    /// Builds the container images of the pods of the storage tests, and returns their archives. `pause` is the program of that
    /// name of `testvm-guest`.
    ///
    /// # Errors
    /// A package cannot be fetched, or an archive cannot be written.
    pub async fn image_archives(&self, session: &Session, pause: &Path) -> Result<Vec<PathBuf>> {
        let listed = Program::new(&self.e2e).arg("--list-images").run().await.context("list the images")?;
        let programs = images::Programs { agnhost: &self.agnhost, pause };
        images::archives(session, &listed.stdout, &programs).await
    }

    /// Starts specs. [`REPORT`] and the output are in `directory` after their end, also after SIGTERM.
    ///
    /// # Errors
    /// The runner of the specs cannot be started.
    pub fn start(&self, specs: &Specs, target: Target<'_>, directory: &Path) -> Result<Process> {
        Program::new(&self.ginkgo)
            .args(ginkgo_args(specs, directory))
            .arg(&self.e2e)
            .arg("--")
            .arg("--provider=skeleton")
            .arg(flag("--kubeconfig", target.kubeconfig))
            .arg(flag("--kubectl-path", target.kubectl))
            .arg(flag("--storage.testdriver", target.driver))
            .arg(flag("--e2e-output-dir", directory))
            .env("KUBE_SSH_KEY_PATH", NO_KEY)
            .log(directory.join(LOG))
            .spawn()
    }
}

fn ginkgo_args(specs: &Specs, directory: &Path) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec![
        format!("--procs={}", specs.processes).into(),
        format!("--seed={SEED}").into(),
        format!("--timeout={}s", specs.timeout.as_secs()).into(),
        format!("--json-report={REPORT}").into(),
        "--no-color".into(),
        // The output of passed specs too: of a run that dies, nothing else is left.
        "-v".into(),
    ];
    if !specs.labels.is_empty() {
        args.push(format!("--label-filter={}", specs.labels).into());
    }
    args.extend(specs.focus.iter().map(|text| format!("--focus={text}").into()));
    args.extend(specs.skip.iter().map(|text| format!("--skip={text}").into()));
    args.push(flag("--output-dir", directory));
    args
}

/// Returns the module with the tests of a release.
fn module(minor: KubernetesMinor) -> Result<GoModule> {
    conformance(minor).with_context(|| {
        let pinned = KubernetesMinor::ALL.into_iter().filter(|minor| conformance(*minor).is_some());
        let pinned: Vec<_> = pinned.map(KubernetesMinor::name).collect();
        format!(
            "the storage tests of Kubernetes {} are not in vm-images/conformance: select one of {} with --kubernetes",
            minor.name(),
            pinned.join(", ")
        )
    })
}

/// Checks that the tests are of the release that the clusters run: tests of another one may expect other behaviour.
fn require_same_release(session: &Session, tests: &GoModule, cluster: &GoModule) -> Result<()> {
    let (of_tests, of_cluster) = (pinned_version(session, tests)?, pinned_version(session, cluster)?);
    anyhow::ensure!(
        of_tests == of_cluster,
        "vm-images/{} requires Kubernetes {of_tests}, and vm-images/{} {of_cluster}: require the same release in both",
        tests.name,
        cluster.name
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error lists the releases that have tests.
    #[test]
    fn release_without_tests_is_refused() {
        let error = module(KubernetesMinor::V1_35).unwrap_err().to_string();
        assert!(error.contains("select one of 1.37, 1.36 with --kubernetes"), "{error}");
    }
}
