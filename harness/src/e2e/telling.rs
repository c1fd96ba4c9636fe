//! The stories in their order, and where in it something is broken if that is asked for.

use std::time::Duration;

use super::breakage::{self, Breakage};
use super::stories::power_cut::{self, Load};
use super::stories::{
    bad_claims, clones, deletion_in_use, driver_restart, flow, half_provisioned, infeasible_resize, install,
    orphans, outages, read_only_claims, removal, retained_volumes, second_node, user_namespaces,
};
use super::story::{Story, Told};
use crate::report::{Outcome, Report};
use crate::session::Session;
use crate::test_env::env::World;
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::create_namespace;

/// All stories, in the order in which they run.
pub(super) const NAMES: [&str; 16] = [
    install::NAME,
    flow::NAME,
    read_only_claims::NAME,
    clones::NAME,
    infeasible_resize::NAME,
    retained_volumes::NAME,
    deletion_in_use::NAME,
    orphans::NAME,
    bad_claims::NAME,
    driver_restart::NAME,
    user_namespaces::NAME,
    half_provisioned::NAME,
    outages::NAME,
    second_node::NAME,
    power_cut::NAME,
    removal::NAME,
];

/// The stories that a run tells.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    only: &'a [String],
}

impl<'a> Selection<'a> {
    /// Selects the stories of these names, and those that others need: the first and the last. Selects all if there are no
    /// names.
    pub(super) fn new(only: &'a [String]) -> Selection<'a> {
        Selection { only }
    }

    fn contains(self, name: &str) -> bool {
        let needed = [install::NAME, removal::NAME];
        self.only.is_empty() || needed.contains(&name) || self.only.iter().any(|only| only == name)
    }
}

/// Tells the selected stories; those after one that failed are reported as not run.
pub(super) async fn tell_all(
    session: &Session,
    report: &mut Report,
    world: &World<'_>,
    selection: Selection<'_>,
    broken: Option<Breakage>,
) {
    let untold = NAMES.into_iter().filter(|name| selection.contains(name)).collect();
    let mut teller = Teller { session, report, world, selection, broken, untold };
    // The report has what went wrong.
    drop(teller.tell().await);
    for name in teller.untold {
        report.push(name, "the whole story", Outcome::NotRun, Duration::ZERO);
    }
}

struct Teller<'a> {
    session: &'a Session,
    report: &'a mut Report,
    world: &'a World<'a>,
    selection: Selection<'a>,
    broken: Option<Breakage>,
    untold: Vec<&'static str>,
}

impl Teller<'_> {
    fn begin(&mut self, name: &'static str) -> Story<'_> {
        self.untold.retain(|untold| *untold != name);
        Story::begin(self.session, self.report, name)
    }

    /// Begins a story if it is selected.
    fn begin_selected(&mut self, name: &'static str) -> Option<Story<'_>> {
        self.selection.contains(name).then(|| self.begin(name))
    }

    async fn tell(&mut self) -> Told {
        let (world, broken) = (self.world, self.broken);
        let before = self.install().await?;
        match &mut self.begin_selected(flow::NAME) {
            Some(story) => flow::tell(story, world, broken).await?,
            // The namespace is that story's, and the others use it.
            None => {
                self.begin("namespace")
                    .step("create it", create_namespace(&world.client, &world.namespace))
                    .await?
            }
        }
        if let Some(story) = &mut self.begin_selected(read_only_claims::NAME) {
            read_only_claims::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(clones::NAME) {
            clones::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(infeasible_resize::NAME) {
            infeasible_resize::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(retained_volumes::NAME) {
            retained_volumes::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(deletion_in_use::NAME) {
            deletion_in_use::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(orphans::NAME) {
            orphans::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(bad_claims::NAME) {
            bad_claims::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(driver_restart::NAME) {
            driver_restart::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(user_namespaces::NAME) {
            user_namespaces::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(half_provisioned::NAME) {
            half_provisioned::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(outages::NAME) {
            outages::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(second_node::NAME) {
            second_node::tell(story, world).await?;
        }
        if let Some(story) = &mut self.begin_selected(power_cut::NAME) {
            power_cut::tell(story, world, Load::FULL, broken).await?;
        }
        let mut story = self.begin(removal::NAME);
        if broken == Some(Breakage::Leak) {
            story.step("break: leak a loop device", breakage::leak_loop_device(world)).await?;
        }
        removal::tell(&mut story, world, before.as_ref()).await
    }

    /// Answers what was on the node before the first volume.
    async fn install(&mut self) -> Told<Option<Inventory>> {
        let (world, broken) = (self.world, self.broken);
        let mut story = self.begin(install::NAME);
        let Some(node) = world.node else {
            install::tell(&mut story, world).await?;
            return Ok(None);
        };
        match broken {
            Some(Breakage::Quota) => {
                let broken =
                    async { breakage::mount_without_quota(node, &breakage::data_device(node).await?).await };
                story.step("break: mount without quota", broken).await?;
            }
            Some(Breakage::NoDisk) => {
                story.step("break: unmount the data disk", breakage::unmount(node)).await?;
            }
            _ => {}
        }
        install::tell(&mut story, world).await?;
        if broken == Some(Breakage::WrongDisk) {
            story.step("break: stop the driver", install::stop(world)).await?;
            let replaced = async { breakage::replace(node, &breakage::data_device(node).await?).await };
            story.step("break: put another file system there", replaced).await?;
            install::tell(&mut story, world).await?;
        }
        story.step("look at the node", Inventory::take(node)).await.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_has_the_first_and_the_last_story_and_none_that_it_does_not_name() {
        let selected = |only: &[&str]| -> Vec<&str> {
            let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
            NAMES.into_iter().filter(|name| Selection::new(&only).contains(name)).collect()
        };
        assert_eq!(selected(&[]), NAMES);
        assert_eq!(selected(&["clones"]), [install::NAME, "clones", removal::NAME]);
    }
}
