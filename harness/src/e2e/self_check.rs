//! Breaks each thing in turn on one cluster, and passes only if each is noticed for its own reason.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;

use super::breakage::{self, Breakage};
use super::stories::power_cut::{self, Load};
use super::stories::{flow, install, removal};
use super::story::Story;
use crate::cluster::Node;
use crate::cluster::api_error::told;
use crate::cluster::waiting::until_event;
use crate::report::{Outcome, Report};
use crate::session::Session;
use crate::test_env::containers::{Container, thaw};
use crate::test_env::env::{FOREIGN_NODE, Patience, World};
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::create_namespace;

const NAME: &str = "broken on purpose";

/// Adds one case per breakage to the report. What stories that fail for good reason leave behind would be
/// blamed on a breakage, so nothing is broken after one.
pub(super) async fn run(session: &Session, report: &mut Report, mut world: World<'_>) {
    if !report.succeeded() {
        report.push(NAME, "the whole story", Outcome::NotRun, Duration::ZERO);
        return;
    }
    let patience = world.patience;
    let mut story = Story::begin(session, report, NAME);
    let mut inner = Report::new();
    for broken in breakage::ALL {
        let title = format!("--break {}: the run fails and names it", broken.name());
        world.patience = patience;
        let noticed = async {
            let checker = Checker { session, node: world.node.context(FOREIGN_NODE)? };
            checker.check(&mut world, &mut inner, broken).await
        };
        if story.step(&title, noticed).await.is_err() {
            return;
        }
    }
}

struct Checker<'a> {
    session: &'a Session,
    node: &'a Node,
}

impl Checker<'_> {
    async fn check(&self, world: &mut World<'_>, inner: &mut Report, broken: Breakage) -> Result<()> {
        let told = inner.cases.len();
        match broken {
            Breakage::Quota | Breakage::NoDisk => {
                install::stop(world).await?;
                let device = breakage::data_device(self.node).await?;
                if broken == Breakage::Quota {
                    breakage::mount_without_quota(self.node, &device).await?;
                } else {
                    breakage::unmount(self.node).await?;
                }
                self.install_fails(world, inner, told, broken).await?;
                breakage::mount_properly(self.node, &device).await
            }
            Breakage::WrongDisk => {
                let device = breakage::data_device(self.node).await?;
                self.install(world, inner).await?;
                install::stop(world).await?;
                breakage::replace(self.node, &device).await?;
                self.install_fails(world, inner, told, broken).await?;
                // The record of the file system that is gone, as an operator would remove it on purpose.
                breakage::forget_identity(self.node).await?;
                self.install(world, inner).await
            }
            Breakage::Readonly | Breakage::Resize => {
                self.install_anew(world, inner).await?;
                world.patience.grow = Patience::SHORT.grow;
                let outcome = flow::tell(&mut self.story(inner, flow::NAME), world, Some(broken)).await;
                anyhow::ensure!(outcome.is_err(), "the flow passed");
                named(inner, told, broken)?;
                for pod in world.live_driver_pods().await? {
                    for container in world.driver.containers().filter(|_| broken == Breakage::Resize) {
                        thaw(self.node, &Container::of(&pod, container)?).await?;
                    }
                }
                self.clean_up(world).await
            }
            Breakage::Unsynced => {
                create_namespace(&world.client, &world.namespace).await?;
                let story = &mut self.story(inner, power_cut::NAME);
                let outcome = power_cut::tell(story, world, Load::LEAST, Some(broken)).await;
                anyhow::ensure!(outcome.is_err(), "the power cut passed");
                named(inner, told, broken)?;
                self.clean_up(world).await
            }
            Breakage::Leak => {
                self.install_anew(world, inner).await?;
                let before = Inventory::take(self.node).await?;
                let outcome = flow::tell(&mut self.story(inner, flow::NAME), world, None).await;
                anyhow::ensure!(outcome.is_ok(), "the flow failed: {}", failure(inner, told));
                let device = breakage::leak_loop_device(world).await?;
                // What takes its time goes first: then only what leaked is waited for.
                self.clean_up(world).await?;
                let patience = std::mem::replace(&mut world.patience.end, Patience::SHORT.end);
                let story = &mut self.story(inner, removal::NAME);
                let outcome = removal::tell(story, world, Some(&before)).await;
                anyhow::ensure!(outcome.is_err(), "the removal passed");
                named(inner, told, broken)?;
                breakage::detach(self.node, &device).await?;
                // The driver keeps the deleted image until no device has it open, and looks again after a minute.
                world.patience.end = patience;
                removal::nothing_left(world, self.node, &before).await
            }
        }
    }

    /// For a flow that kills the driver: a kubelet waits longer each time before it starts a container again that has ended.
    async fn install_anew(&self, world: &World<'_>, inner: &mut Report) -> Result<()> {
        install::stop(world).await?;
        self.install(world, inner).await
    }

    async fn install(&self, world: &World<'_>, inner: &mut Report) -> Result<()> {
        let told = inner.cases.len();
        let outcome = install::tell(&mut self.story(inner, install::NAME), world).await;
        anyhow::ensure!(outcome.is_ok(), "the repaired driver cannot be installed: {}", failure(inner, told));
        Ok(())
    }

    async fn install_fails(
        &self,
        world: &mut World<'_>,
        inner: &mut Report,
        told: usize,
        broken: Breakage,
    ) -> Result<()> {
        world.manifests.apply(&world.client).await?;
        // From then on there is nothing to wait for.
        self.said_in_an_event(world, broken).await?;
        let patience = std::mem::replace(&mut world.patience, Patience::SHORT);
        let outcome = install::tell(&mut self.story(inner, install::NAME), world).await;
        world.patience = patience;
        anyhow::ensure!(outcome.is_err(), "the driver was installed");
        named(inner, told, broken)?;
        install::stop(world).await
    }

    /// Whoever describes the node reads why its volumes are not served.
    async fn said_in_an_event(&self, world: &World<'_>, broken: Breakage) -> Result<()> {
        let nodes: Api<NodeObject> = Api::all(world.client.clone());
        let node = nodes.get(self.node.name()).await.map_err(told)?;
        let message =
            until_event(&world.client, &node, &["StorageUnavailable"], world.patience.end, |message| {
                broken.named_by().iter().all(|word| message.contains(word))
            });
        message.await.map(drop)
    }

    async fn clean_up(&self, world: &World<'_>) -> Result<()> {
        removal::delete_namespace(world).await?;
        removal::no_volumes(world).await
    }

    fn story<'r>(&'r self, inner: &'r mut Report, name: &'static str) -> Story<'r> {
        Story::begin_unseen(self.session, inner, name)
    }
}

/// The failure since case `told` must say what was broken.
fn named(inner: &Report, told: usize, broken: Breakage) -> Result<()> {
    let failure = failure(inner, told);
    let missing: Vec<_> = broken.named_by().iter().filter(|word| !failure.contains(**word)).collect();
    anyhow::ensure!(missing.is_empty(), "the failure does not say {missing:?}: {failure}");
    Ok(())
}

fn failure(inner: &Report, told: usize) -> String {
    let failed = inner.cases[told..].iter().find_map(|case| match &case.outcome {
        Outcome::Failed(why) => Some(format!("{}: {}: {why}", case.suite, case.name)),
        _ => None,
    });
    failed.unwrap_or_else(|| "nothing failed".into())
}
