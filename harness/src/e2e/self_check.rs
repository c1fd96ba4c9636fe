//! Injects each fault in turn on one cluster. The check passes only if each run fails and its failure names the fault.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::steps::Steps;
use testvm_cluster::Node;
use testvm_cluster::api_error::api_error;
use testvm_cluster::containers::{Container, thaw};
use testvm_cluster::restarts::Watch;
use testvm_cluster::waiting::until_event;

use super::faults::{self, Fault};
use super::restarts;
use super::stories::power_cut::{self, Load};
use super::stories::{flow, install, removal};
use crate::test_env::disturbances::watched;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv, Timeouts};
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::create_namespace;

const NAME: &str = "fault injection";

/// Adds one case per fault to the report. If a story has failed, no fault is injected: what the failed story left behind would be
/// blamed on the fault.
pub(super) async fn run(session: &Session, report: &mut Report, mut env: TestEnv<'_>) {
    if !report.succeeded() {
        report.push(NAME, "all steps", Outcome::NotRun, Duration::ZERO);
        return;
    }
    let timeouts = env.timeouts;
    let mut steps = Steps::begin(session, report, NAME);
    let mut inner = Report::new();
    for broken in faults::ALL {
        let title = format!("--break {}: the run fails and names it", broken.name());
        env.timeouts = timeouts;
        let noticed = async {
            let checker = Checker { session, node: env.node.context(FOREIGN_NODE)? };
            checker.check(&mut env, &mut inner, broken).await
        };
        if steps.step(&title, noticed).await.is_err() {
            return;
        }
    }
}

struct Checker<'a> {
    session: &'a Session,
    node: &'a Node,
}

impl Checker<'_> {
    async fn check(&self, env: &mut TestEnv<'_>, inner: &mut Report, broken: Fault) -> Result<()> {
        let first_case = inner.cases.len();
        match broken {
            Fault::Quota | Fault::NoDisk => {
                install::stop(env).await?;
                let device = faults::data_device(self.node).await?;
                if broken == Fault::Quota {
                    faults::mount_without_quota(self.node, &device).await?;
                } else {
                    faults::unmount(self.node).await?;
                }
                self.install_fails(env, inner, first_case, broken).await?;
                faults::mount_properly(self.node, &device).await
            }
            Fault::WrongDisk => {
                let device = faults::data_device(self.node).await?;
                self.install(env, inner).await?;
                install::stop(env).await?;
                faults::replace(self.node, &device).await?;
                self.install_fails(env, inner, first_case, broken).await?;
                // The record names the old file system. An administrator who replaces a disk removes it as well.
                faults::forget_identity(self.node).await?;
                self.install(env, inner).await
            }
            Fault::Readonly | Fault::Resize => {
                self.reinstall(env, inner).await?;
                env.timeouts.grow = Timeouts::SHORT.grow;
                let outcome = flow::run(&mut self.steps(inner, flow::NAME), env, Some(broken)).await;
                anyhow::ensure!(outcome.is_err(), "the flow passed");
                check_failure(inner, first_case, broken)?;
                for pod in env.live_driver_pods().await? {
                    for container in env.driver.containers().filter(|_| broken == Fault::Resize) {
                        thaw(self.node, &Container::of(&pod, container)?).await?;
                    }
                }
                self.clean_up(env).await
            }
            Fault::Unsynced => {
                create_namespace(&env.client, &env.namespace).await?;
                let steps = &mut self.steps(inner, power_cut::NAME);
                let outcome = power_cut::run(steps, env, self.node, Load::LEAST, Some(broken)).await;
                anyhow::ensure!(outcome.is_err(), "the power cut passed");
                check_failure(inner, first_case, broken)?;
                self.clean_up(env).await
            }
            Fault::Leak => {
                self.reinstall(env, inner).await?;
                let before = Inventory::take(self.node).await?;
                let outcome = flow::run(&mut self.steps(inner, flow::NAME), env, None).await;
                anyhow::ensure!(outcome.is_ok(), "the flow failed: {}", failure(inner, first_case));
                let device = faults::leak(env).await?;
                // The slow clean-up comes first, so that the short timeout covers only what was leaked.
                self.clean_up(env).await?;
                let timeouts = std::mem::replace(&mut env.timeouts.end, Timeouts::SHORT.end);
                let steps = &mut self.steps(inner, removal::NAME);
                let outcome = removal::run(steps, env, Some(&before)).await;
                anyhow::ensure!(outcome.is_err(), "the removal passed");
                check_failure(inner, first_case, broken)?;
                faults::remove_leak(self.node, &device).await?;
                // The driver keeps a deleted image while a device has it open, and checks again after a minute.
                env.timeouts.end = timeouts;
                removal::nothing_left(env, self.node, &before).await
            }
            Fault::Restart => {
                let mut watch = Watch::start(watched(env), &env.caused).await?;
                faults::kill_undeclared(env).await?;
                let steps = &mut self.steps(inner, restarts::NAME);
                let outcome = restarts::check(steps, &mut watch, env, broken.name()).await;
                anyhow::ensure!(outcome.is_err(), "the restart went unseen");
                check_failure(inner, first_case, broken)
            }
        }
    }

    /// Reinstalls the driver before a flow that kills it: the kubelet's restart back-off would otherwise grow with each kill.
    async fn reinstall(&self, env: &TestEnv<'_>, inner: &mut Report) -> Result<()> {
        install::stop(env).await?;
        self.install(env, inner).await
    }

    async fn install(&self, env: &TestEnv<'_>, inner: &mut Report) -> Result<()> {
        let first_case = inner.cases.len();
        let outcome = install::run(&mut self.steps(inner, install::NAME), env).await;
        anyhow::ensure!(
            outcome.is_ok(),
            "the repaired driver cannot be installed: {}",
            failure(inner, first_case)
        );
        Ok(())
    }

    async fn install_fails(
        &self,
        env: &mut TestEnv<'_>,
        inner: &mut Report,
        first_case: usize,
        broken: Fault,
    ) -> Result<()> {
        env.manifests.apply(&env.client).await?;
        // Once the event is recorded, the state does not change any more, so short timeouts are enough.
        self.wait_for_event(env, broken).await?;
        let timeouts = std::mem::replace(&mut env.timeouts, Timeouts::SHORT);
        let outcome = install::run(&mut self.steps(inner, install::NAME), env).await;
        env.timeouts = timeouts;
        anyhow::ensure!(outcome.is_err(), "the driver was installed");
        check_failure(inner, first_case, broken)?;
        install::stop(env).await
    }

    /// Waits for the event on the Node that says why its volumes are unavailable.
    async fn wait_for_event(&self, env: &TestEnv<'_>, broken: Fault) -> Result<()> {
        let nodes: Api<NodeObject> = Api::all(env.client.clone());
        let node = nodes.get(self.node.name()).await.map_err(api_error)?;
        let message = until_event(&env.client, &node, &["StorageUnavailable"], env.timeouts.end, |message| {
            broken.expected_in_failure().iter().all(|word| message.contains(word))
        });
        message.await.map(drop)
    }

    async fn clean_up(&self, env: &TestEnv<'_>) -> Result<()> {
        removal::delete_namespace(env).await?;
        removal::no_volumes(env).await
    }

    fn steps<'r>(&'r self, inner: &'r mut Report, name: &'static str) -> Steps<'r> {
        Steps::begin_hidden(self.session, inner, name)
    }
}

/// Checks that the first failure from case `first_case` on contains the words that name the fault.
fn check_failure(inner: &Report, first_case: usize, broken: Fault) -> Result<()> {
    let failure = failure(inner, first_case);
    let missing: Vec<_> =
        broken.expected_in_failure().iter().filter(|word| !failure.contains(**word)).collect();
    anyhow::ensure!(missing.is_empty(), "the failure does not contain {missing:?}: {failure}");
    Ok(())
}

fn failure(inner: &Report, first_case: usize) -> String {
    let failed = inner.cases[first_case..].iter().find_map(|case| match &case.outcome {
        Outcome::Failed(why) => Some(format!("{}: {}: {why}", case.suite, case.name)),
        _ => None,
    });
    failed.unwrap_or_else(|| "nothing failed".into())
}
