//! The scenarios in their order, and where in it something is broken if that is asked for.

use std::time::Duration;

use super::faults::{self, Fault};
use super::scenario::{Scenario, StepResult};
use super::scenarios::power_cut::{self, Load};
use super::scenarios::{
    bad_claims, clones, deletion_in_use, driver_restart, flow, half_provisioned, infeasible_resize, install,
    orphans, outages, read_only_claims, removal, retained_volumes, second_node, user_namespaces,
};
use crate::report::{Outcome, Report};
use crate::session::Session;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::create_namespace;

/// All scenarios, in the order in which they run.
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

/// The scenarios that a run tells.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    only: &'a [String],
}

impl<'a> Selection<'a> {
    /// Selects the scenarios of these names, and those that others need: the first and the last. Selects all if there are no
    /// names.
    pub(super) fn new(only: &'a [String]) -> Selection<'a> {
        Selection { only }
    }

    fn contains(self, name: &str) -> bool {
        let needed = [install::NAME, removal::NAME];
        self.only.is_empty() || needed.contains(&name) || self.only.iter().any(|only| only == name)
    }
}

/// Tells the selected scenarios; those after one that failed are reported as not run.
pub(super) async fn run_all(
    session: &Session,
    report: &mut Report,
    env: &TestEnv<'_>,
    selection: Selection<'_>,
    broken: Option<Fault>,
) {
    let remaining = NAMES.into_iter().filter(|name| selection.contains(name)).collect();
    let mut runner = ScenarioRunner { session, report, env, selection, broken, remaining };
    // The report has what went wrong.
    drop(runner.run().await);
    for name in runner.remaining {
        report.push(name, "the whole scenario", Outcome::NotRun, Duration::ZERO);
    }
}

struct ScenarioRunner<'a> {
    session: &'a Session,
    report: &'a mut Report,
    env: &'a TestEnv<'a>,
    selection: Selection<'a>,
    broken: Option<Fault>,
    remaining: Vec<&'static str>,
}

impl ScenarioRunner<'_> {
    fn begin(&mut self, name: &'static str) -> Scenario<'_> {
        self.remaining.retain(|remaining| *remaining != name);
        Scenario::begin(self.session, self.report, name)
    }

    /// Begins a scenario if it is selected.
    fn begin_selected(&mut self, name: &'static str) -> Option<Scenario<'_>> {
        self.selection.contains(name).then(|| self.begin(name))
    }

    async fn run(&mut self) -> StepResult {
        let (env, broken) = (self.env, self.broken);
        let before = self.install().await?;
        match &mut self.begin_selected(flow::NAME) {
            Some(scenario) => flow::run(scenario, env, broken).await?,
            // The namespace is that scenario's, and the others use it.
            None => {
                self.begin("namespace")
                    .step("create it", create_namespace(&env.client, &env.namespace))
                    .await?
            }
        }
        if let Some(scenario) = &mut self.begin_selected(read_only_claims::NAME) {
            read_only_claims::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(clones::NAME) {
            clones::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(infeasible_resize::NAME) {
            infeasible_resize::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(retained_volumes::NAME) {
            retained_volumes::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(deletion_in_use::NAME) {
            deletion_in_use::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(orphans::NAME) {
            orphans::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(bad_claims::NAME) {
            bad_claims::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(driver_restart::NAME) {
            driver_restart::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(user_namespaces::NAME) {
            user_namespaces::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(half_provisioned::NAME) {
            half_provisioned::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(outages::NAME) {
            outages::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(second_node::NAME) {
            second_node::run(scenario, env).await?;
        }
        if let Some(scenario) = &mut self.begin_selected(power_cut::NAME) {
            power_cut::run(scenario, env, Load::FULL, broken).await?;
        }
        let mut scenario = self.begin(removal::NAME);
        if broken == Some(Fault::Leak) {
            scenario.step("break: leak a loop device", faults::leak_loop_device(env)).await?;
        }
        removal::run(&mut scenario, env, before.as_ref()).await
    }

    /// Answers what was on the node before the first volume.
    async fn install(&mut self) -> StepResult<Option<Inventory>> {
        let (env, broken) = (self.env, self.broken);
        let mut scenario = self.begin(install::NAME);
        let Some(node) = env.node else {
            install::run(&mut scenario, env).await?;
            return Ok(None);
        };
        match broken {
            Some(Fault::Quota) => {
                let broken =
                    async { faults::mount_without_quota(node, &faults::data_device(node).await?).await };
                scenario.step("break: mount without quota", broken).await?;
            }
            Some(Fault::NoDisk) => {
                scenario.step("break: unmount the data disk", faults::unmount(node)).await?;
            }
            _ => {}
        }
        install::run(&mut scenario, env).await?;
        if broken == Some(Fault::WrongDisk) {
            scenario.step("break: stop the driver", install::stop(env)).await?;
            let replaced = async { faults::replace(node, &faults::data_device(node).await?).await };
            scenario.step("break: put another file system there", replaced).await?;
            install::run(&mut scenario, env).await?;
        }
        scenario.step("look at the node", Inventory::take(node)).await.map(Some)
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
