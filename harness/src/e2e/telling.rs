//! The stories in their order, and where in it something is broken if that is asked for.

use std::time::Duration;

use super::breakage::{self, Breakage};
use super::inventory::Inventory;
use super::stories::power_cut::{self, Load};
use super::stories::{
    bad_claims, clones, deletion_in_use, driver_restart, flow, full_node, half_provisioned,
    infeasible_resize, install, orphans, outages, read_only_claims, removal, retained_volumes,
};
use super::story::{Story, Told};
use super::world::World;
use crate::report::{Outcome, Report};
use crate::session::Session;

/// Tells every story; those after one that failed are reported as not run.
pub(super) async fn tell_all(
    session: &Session,
    report: &mut Report,
    world: &World<'_>,
    broken: Option<Breakage>,
) {
    let untold = vec![
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
        half_provisioned::NAME,
        outages::NAME,
        full_node::NAME,
        power_cut::NAME,
        removal::NAME,
    ];
    let mut teller = Teller { session, report, world, broken, untold };
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
    broken: Option<Breakage>,
    untold: Vec<&'static str>,
}

impl Teller<'_> {
    fn begin(&mut self, name: &'static str) -> Story<'_> {
        self.untold.retain(|untold| *untold != name);
        Story::begin(self.session, self.report, name)
    }

    async fn tell(&mut self) -> Told {
        let (world, broken) = (self.world, self.broken);
        let before = self.install().await?;
        flow::tell(&mut self.begin(flow::NAME), world, broken).await?;
        read_only_claims::tell(&mut self.begin(read_only_claims::NAME), world).await?;
        clones::tell(&mut self.begin(clones::NAME), world).await?;
        infeasible_resize::tell(&mut self.begin(infeasible_resize::NAME), world).await?;
        retained_volumes::tell(&mut self.begin(retained_volumes::NAME), world).await?;
        deletion_in_use::tell(&mut self.begin(deletion_in_use::NAME), world).await?;
        orphans::tell(&mut self.begin(orphans::NAME), world).await?;
        bad_claims::tell(&mut self.begin(bad_claims::NAME), world).await?;
        driver_restart::tell(&mut self.begin(driver_restart::NAME), world).await?;
        half_provisioned::tell(&mut self.begin(half_provisioned::NAME), world).await?;
        outages::tell(&mut self.begin(outages::NAME), world).await?;
        full_node::tell(&mut self.begin(full_node::NAME), world).await?;
        power_cut::tell(&mut self.begin(power_cut::NAME), world, Load::FULL, broken).await?;
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
