//! The options of `cargo harness test`, and the lanes that they select.

use std::num::NonZero;
use std::path::Path;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;

use super::again::{self, Failed};
use super::lane::{self, LANES, Lane, LaneArgs, LaneOption};

/// Runs lanes, and all of them even if one fails. Without --lane, it runs the lanes that CI
/// runs, which `cargo harness list` shows without a note. An option of some lanes then selects those of them that CI runs.
#[derive(Debug, clap::Args)]
pub struct TestArgs {
    /// Run only this lane; may be given more than once.
    #[arg(long = "lane", value_name = "LANE", value_parser = PossibleValuesParser::new(lane::names()))]
    lanes: Vec<String>,
    /// Run again what failed in the last run: its tests, or its lanes if something else than a test failed.
    #[arg(long, conflicts_with_all = ["lanes", "only", "quick"])]
    failed: bool,
    /// Run everything this many times, and stop after the first run with a failure.
    #[arg(long, value_name = "N", default_value = "1", value_parser = times)]
    pub(super) repeat: NonZero<u32>,
    /// The lanes and parts that --failed repeats.
    #[arg(skip)]
    again: Option<Vec<&'static Lane>>,
    #[command(flatten)]
    pub(super) of_lanes: LaneArgs,
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
        let Failed { lanes, tests } = again::failed(report)?;
        let failed: Vec<&Lane> = LANES.iter().filter(|lane| lanes.contains(&lane.title())).collect();
        anyhow::ensure!(
            !failed.is_empty(),
            "--failed: in the last run, {}, no lane failed, but for example a text of --only that is in the name of no test; run its \
             command again",
            report.display()
        );
        let take_names = failed.iter().all(|lane| lane.part.is_none() && lane.takes(LaneOption::Only));
        self.of_lanes.only = tests.into_iter().filter(|_| take_names).collect();
        self.again = Some(failed);
        Ok(())
    }

    /// Refuses options that select no lane, that a selected lane does not take, or that cannot work together.
    ///
    /// # Errors
    /// As for [`TestArgs::selected`], and for those of the stories.
    pub(crate) fn check(&self) -> Result<()> {
        self.selected()?;
        self.of_lanes.e2e.check()
    }

    /// Returns the lanes and parts to run: those that --lane and --only name, or those of CI that take every given option.
    /// Without --only, the parts of a named lane run that take every given option.
    ///
    /// # Errors
    /// A named lane or part does not take an option, or no lane takes all of them: a user would believe that they had an effect.
    /// A text of --only names no part of a lane with parts.
    pub(super) fn selected(&self) -> Result<Vec<&'static Lane>> {
        let given = LaneOption::given(&self.of_lanes);
        let takes_all = |lane: &&Lane| given.iter().all(|option| lane.takes(*option));
        if self.lanes.is_empty() && self.again.is_none() {
            let selected: Vec<&Lane> =
                LANES.iter().filter(|lane| lane.runs_in_ci).filter(takes_all).collect();
            let names = || given.iter().map(|option| option.names()).collect::<Vec<_>>().join(" and ");
            if selected.is_empty() {
                let remedy = match LANES.iter().any(|lane| takes_all(&lane)) {
                    true => "name the lane with --lane",
                    false => "no other lane does either, so leave one out",
                };
                anyhow::bail!("no lane of CI takes {}: {remedy}", names());
            }
            return Ok(selected);
        }
        let named = match &self.again {
            Some(lanes) => lanes.clone(),
            None => self.parts(
                LANES.iter().filter(|lane| self.lanes.iter().any(|name| name == lane.lane)).collect(),
            )?,
        };
        for option in &given {
            // A lane refuses an option that none of its parts takes.
            // Nothing that --failed repeats is left out.
            let refuses = |lane: &&&Lane| match self.of_lanes.only.is_empty() && self.again.is_none() {
                true => !named.iter().any(|other| other.lane == lane.lane && other.takes(*option)),
                false => !lane.takes(*option),
            };
            if let Some(lane) = named.iter().find(refuses) {
                let all_parts = LANES.iter().all(|lane| lane.part.is_none() || lane.takes(*option));
                let name = |lane: &Lane| if all_parts { lane.lane.to_owned() } else { lane.title() };
                let mut takers: Vec<String> =
                    LANES.iter().filter(|lane| lane.takes(*option)).map(name).collect();
                takers.dedup();
                let takers = takers.join(", ");
                let option = option.names();
                anyhow::bail!(
                    "the lane {} does not take {option}, which the lanes {takers} take; leave it out",
                    lane.title()
                );
            }
        }
        Ok(named.into_iter().filter(takes_all).collect())
    }

    /// Returns the lanes without those parts that --only does not name.
    fn parts(&self, lanes: Vec<&'static Lane>) -> Result<Vec<&'static Lane>> {
        let only = &self.of_lanes.only;
        let parts: Vec<&str> = lanes.iter().filter_map(|lane| lane.part).collect();
        if only.is_empty() || parts.is_empty() {
            return Ok(lanes);
        }
        anyhow::ensure!(
            parts.len() == lanes.len(),
            "--only names parts of one lane and tests of another: run the lanes with two commands"
        );
        if let Some(text) = only.iter().find(|text| !parts.contains(&text.as_str())) {
            anyhow::bail!("no selected lane has the part {text}; the parts are {}", parts.join(", "));
        }
        let is_named = |lane: &&Lane| lane.part.is_some_and(|part| only.iter().any(|text| text == part));
        Ok(lanes.into_iter().filter(is_named).collect())
    }
}

fn times(text: &str) -> Result<NonZero<u32>> {
    text.parse().context("it must be a number, and at least 1")
}

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
    #[case("--lane extended --only image --kernel bookworm", "extended image", "extended node")]
    #[case("--lane extended --only versions --kubernetes 1.36", "extended versions", "apiserver")]
    #[case("--lane extended --only node --only kind --kernel bookworm", "extended kind", "extended node")]
    #[case("--lane extended --quick", "extended", "conformance")]
    #[case("--lane extended --only node --keep", "extended node", "e2e")]
    #[case("--lane sanity --only claim", "sanity", "conformance")]
    #[case("--lane kernel --kubelet patched", "kernel", "e2e")]
    #[case("--lane conformance --self-check", "conformance", "e2e")]
    #[case("--lane kernel --kubernetes 1.36", "kernel", "apiserver")]
    #[case::beside_a_lane_that_takes_it("--lane unit --lane kernel --only quota", "unit", "kernel")]
    #[case::one_of_two_options("--lane kernel --only quota --keep", "kernel", "e2e")]
    fn option_of_another_lane_is_refused(#[case] line: &str, #[case] lane: &str, #[case] taker: &str) {
        let message = parse(line).selected().unwrap_err().to_string();
        assert!(message.starts_with(&format!("the lane {lane} ")) && message.contains(taker), "{message}");
    }

    #[rstest]
    #[case("--quick", "name the lane with --lane")]
    #[case("--only quota --keep", "leave one out")]
    #[case("--only quota --self-check", "leave one out")]
    fn options_without_common_lane_are_refused(#[case] line: &str, #[case] remedy: &str) {
        let message = parse(line).selected().unwrap_err().to_string();
        assert!(message.starts_with("no lane of CI takes --") && message.ends_with(remedy), "{message}");
    }

    #[rstest]
    #[case("--lane extended --only imag", "no selected lane has the part imag; the parts are long-stories, ")]
    #[case("--lane extended --only image --only flow", "no selected lane has the part flow; ")]
    #[case(
        "--lane extended --lane kernel --only image",
        "--only names parts of one lane and tests of another"
    )]
    fn a_text_that_is_no_part_is_refused(#[case] line: &str, #[case] expected: &str) {
        let message = parse(line).selected().unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
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
    #[case("--lane e2e --kubelet patched --self-check", &["e2e"])]
    #[case("--lane extended --only node --kernel bookworm", &["extended node"])]
    #[case("--lane extended --kernel bookworm", &["extended node"])]
    #[case("--lane extended --only kind --kubernetes 1.36", &["extended kind"])]
    #[case("--lane extended --only kind --only node", &["extended node", "extended kind"])]
    #[case("--lane conformance --lane unit", &["unit", "conformance"])]
    fn option_selects_lanes_that_take_it(#[case] line: &str, #[case] lanes: &[&str]) {
        let selected = parse(line).selected().unwrap();
        assert_eq!(selected.into_iter().map(Lane::title).collect::<Vec<_>>(), lanes);
    }

    /// The failures of a release are in parts and in other lanes.
    #[rstest]
    #[case(&[("extended kind", "flow: x"), ("kernel", "a::b")], &["kernel", "extended kind"], &[])]
    #[case(&[("apiserver", "live::x"), ("kernel", "a::b")], &["apiserver", "kernel"], &["a::b", "live::x"])]
    fn failed_lanes_and_parts_are_selected(
        #[case] cases: &[(&str, &str)],
        #[case] lanes: &[&str],
        #[case] only: &[&str],
    ) {
        let mut report = testvm::report::Report::new();
        for (lane, name) in cases {
            report.push("suite", name, testvm::report::Outcome::NotRun, None);
            report.cases.last_mut().unwrap().lane = Some((*lane).to_owned());
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, serde_json::to_vec(&report).unwrap()).unwrap();
        let mut args = parse("--failed");
        args.resolve_failed(file.path()).unwrap();
        assert_eq!(args.selected().unwrap().into_iter().map(Lane::title).collect::<Vec<_>>(), lanes);
        assert_eq!(args.of_lanes.only, only);
        // Not all of them take it.
        args.of_lanes.quick = true;
        assert!(args.selected().unwrap_err().to_string().contains(" does not take --quick"));
    }

    #[test]
    fn lane_without_selection_runs_all_parts() {
        assert_eq!(parse("--lane extended").selected().unwrap().len(), 10);
        let without_two = parse("--lane extended --kubernetes 1.36").selected().unwrap();
        assert_eq!(without_two.len(), 6);
    }
}
