//! The options of `cargo harness test`, and the lanes that they select.

use std::num::NonZero;
use std::path::Path;

use anyhow::Result;

use super::again;
use super::lane::{ALL, Lane};
use crate::e2e;

/// Runs lanes in the order of their cost, and all of them even if one fails. Without --lane, it runs the lanes that CI
/// runs, which `cargo harness list` shows without a note. An option of some lanes then selects those of them that CI runs.
#[derive(Debug, clap::Args)]
pub struct TestArgs {
    /// Run only this lane; may be given more than once.
    #[arg(long = "lane", value_name = "LANE")]
    lanes: Vec<Lane>,
    /// In the kernel, the apiserver, the docker and the conformance lane, run only the tests whose names contain this,
    /// without power cuts; may be given more than once.
    #[arg(long, value_name = "TEXT")]
    pub(super) only: Vec<String>,
    /// In the conformance lane, run only one spec of each suite and mode, and no slow one.
    #[arg(long, conflicts_with = "only")]
    pub(super) quick: bool,
    /// Run again what failed in the last run: its tests, or its lanes if something else than a test failed.
    #[arg(long, conflicts_with_all = ["lanes", "only", "quick"])]
    failed: bool,
    /// Run everything this many times, and stop after the first run with a failure.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) repeat: NonZero<u32>,
    #[command(flatten)]
    pub(super) e2e: e2e::Args,
}

/// An option that only some lanes take.
struct LaneOption {
    names: &'static str,
    is_given: bool,
    takers: &'static [Lane],
}

impl TestArgs {
    /// Replaces `--failed` by the lanes and tests that failed in the run with this `report.json`.
    ///
    /// # Errors
    /// The report cannot be read, or nothing failed.
    pub(crate) fn resolve_failed(&mut self, report: &Path) -> Result<()> {
        if !self.failed {
            return Ok(());
        }
        let failed = again::failed(report)?;
        self.lanes = ALL.into_iter().filter(|lane| failed.lanes.contains(lane.name())).collect();
        anyhow::ensure!(!self.lanes.is_empty(), "{} names no lane of a failure", report.display());
        let take_names = self.lanes.iter().all(|lane| TAKE_ONLY.contains(lane));
        self.only = failed.tests.into_iter().filter(|_| take_names).collect();
        Ok(())
    }

    /// Returns the lanes to run: those that --lane names, or those of CI that take every given option.
    ///
    /// # Errors
    /// A named lane does not take an option, or no lane of CI takes all of them: a user would believe that they had an effect.
    pub(super) fn selected(&self) -> Result<Vec<Lane>> {
        let given: Vec<LaneOption> = self.options().into_iter().filter(|option| option.is_given).collect();
        for LaneOption { names, takers, .. } in &given {
            let refusing = self.lanes.iter().find(|lane| !takers.contains(lane));
            let known = takers.iter().map(|lane| lane.name()).collect::<Vec<_>>().join(", ");
            if let Some(lane) = refusing {
                anyhow::bail!("the lane {} does not take {names}, which the lanes {known} take", lane.name());
            }
        }
        if !self.lanes.is_empty() {
            return Ok(ALL.into_iter().filter(|lane| self.lanes.contains(lane)).collect());
        }
        let takes_all = |lane: &Lane| given.iter().all(|option| option.takers.contains(lane));
        let selected: Vec<Lane> =
            ALL.into_iter().filter(|lane| lane.runs_in_ci() && takes_all(lane)).collect();
        let names = || given.iter().map(|option| option.names).collect::<Vec<_>>().join(" and ");
        anyhow::ensure!(!selected.is_empty(), "no lane of CI takes {}: name the lane with --lane", names());
        Ok(selected)
    }

    fn options(&self) -> [LaneOption; 5] {
        let option = |names, is_given, takers| LaneOption { names, is_given, takers };
        [
            option(
                "--kubernetes and --kubernetes-bin",
                !self.e2e.kubernetes().words().is_empty(),
                &WITH_KUBERNETES,
            ),
            option(
                "--kernel",
                self.e2e.kernel().is_some(),
                &[Lane::Kernel, Lane::Sanity, Lane::E2e, Lane::Node],
            ),
            option("--only", !self.only.is_empty(), &TAKE_ONLY),
            option("--quick", self.quick, &[Lane::Conformance]),
            option("the options of e2e and its nodes", self.e2e.is_of_e2e_only(), &[Lane::E2e]),
        ]
    }
}

/// The lanes that take `--only`.
const TAKE_ONLY: [Lane; 4] = [Lane::Kernel, Lane::Apiserver, Lane::Docker, Lane::Conformance];

/// The lanes that run programs of Kubernetes of the selected release. The lane versions runs all releases.
const WITH_KUBERNETES: [Lane; 10] = [
    Lane::Apiserver,
    Lane::E2e,
    Lane::LongStories,
    Lane::OtherProjects,
    Lane::SelfCheck,
    Lane::Conformance,
    Lane::Node,
    Lane::Kind,
    Lane::Upgrade,
    Lane::SecondDriver,
];

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: TestArgs,
    }

    fn parse(line: &str) -> TestArgs {
        let words = std::iter::once("x").chain(line.split_whitespace());
        <Line as clap::Parser>::parse_from(words).args
    }

    #[rstest]
    #[case("--lane upgrade --kernel bookworm", "upgrade", "node")]
    #[case("--lane second-driver --only claim", "second-driver", "conformance")]
    #[case("--lane upgrade --quick", "upgrade", "conformance")]
    #[case("--lane kernel --kubelet patched", "kernel", "e2e")]
    #[case("--lane conformance --story flow", "conformance", "e2e")]
    #[case("--lane node --keep", "node", "e2e")]
    #[case("--lane kernel --kubernetes 1.36", "kernel", "apiserver")]
    #[case("--lane versions --kubernetes 1.36", "versions", "apiserver")]
    #[case::beside_a_lane_that_takes_it("--lane unit --lane kernel --only quota", "unit", "kernel")]
    #[case::one_of_two_options("--lane kernel --only quota --keep", "kernel", "e2e")]
    fn an_option_that_a_named_lane_does_not_take_is_refused(
        #[case] line: &str,
        #[case] lane: &str,
        #[case] taker: &str,
    ) {
        let message = parse(line).selected().unwrap_err().to_string();
        assert!(message.starts_with(&format!("the lane {lane} ")) && message.contains(taker), "{message}");
    }

    #[rstest]
    #[case("--quick")]
    #[case("--only quota --keep")]
    #[case("--only quota --story flow")]
    fn options_that_no_lane_of_ci_takes_together_are_refused(#[case] line: &str) {
        let message = parse(line).selected().unwrap_err().to_string();
        assert!(message.starts_with("no lane of CI takes --"), "{message}");
    }

    #[rstest]
    #[case("", &["unit", "apiserver", "kernel", "sanity", "docker", "e2e"])]
    #[case("--kernel bookworm", &["kernel", "sanity", "e2e"])]
    #[case("--only quota", &["apiserver", "kernel", "docker"])]
    #[case("--only quota --kernel bookworm", &["kernel"])]
    #[case("--only quota --kubernetes 1.36", &["apiserver"])]
    #[case("--kubernetes 1.36", &["apiserver", "e2e"])]
    #[case("--keep", &["e2e"])]
    #[case("--lane conformance --quick", &["conformance"])]
    #[case("--lane conformance --only claim", &["conformance"])]
    #[case("--lane e2e --kubelet patched --story flow", &["e2e"])]
    #[case("--lane node --kernel bookworm", &["node"])]
    #[case("--lane upgrade --kubernetes 1.36", &["upgrade"])]
    #[case("--lane kind --lane unit", &["unit", "kind"])]
    fn an_option_selects_the_lanes_that_take_it(#[case] line: &str, #[case] lanes: &[&str]) {
        let selected = parse(line).selected().unwrap();
        assert_eq!(selected.into_iter().map(Lane::name).collect::<Vec<_>>(), lanes);
    }
}
