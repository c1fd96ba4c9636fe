//! The test lanes, ordered by cost.

mod again;
mod apiserver;
mod chart;
mod checks;
mod clusters;
mod conformance;
mod dependencies;
mod docker;
mod ginkgo;
mod go_tests;
mod kernel;
mod lane;
mod libtest;
mod machine_faults;
mod machines;
mod mutants;
mod options;
mod passes;
mod power_cut;
mod restored_backup;
mod sanity;
mod second_driver;
mod seed;
mod skips;
mod unit;

use std::time::Instant;

use anyhow::Result;
use futures::StreamExt;
use testvm::go_build;
use testvm::progress::seconds;
use testvm::report::{Outcome, Report, Timed};
use testvm::session::Session;
use testvm::test_machine::MACHINE;

pub(crate) use self::lane::lines;
use self::lane::{LANES, Lane, LaneArgs, LaneOption};
pub use self::options::TestArgs;
use self::passes::{require_pass, with_failure};
use self::skips::Skips;
use crate::listing::{BESIDE_OTHERS, record_time};

/// Runs the selected lanes, and reports each as cases of suites with its name. Stops after the first of several runs with a failure.
///
/// # Errors
/// The options select no lane, or a selected lane does not take them. A lane that cannot run is a failed case, not an error.
pub async fn run(session: &Session, args: &TestArgs) -> Result<Report> {
    let skips = Skips::read(session)?;
    let mut report = Report::new();
    for round in 1..=args.repeat.get() {
        let mut of_round = run_once(session, args, &skips).await?;
        if args.repeat.get() > 1 {
            session.progress.line(format!("run {round} of {}: {}", args.repeat, of_round.summary()));
            of_round.cases.iter_mut().for_each(|case| case.suite += &format!(" (run {round})"));
        }
        report.append(of_round);
        if !report.succeeded() {
            break;
        }
    }
    Ok(report)
}

async fn run_once(session: &Session, args: &TestArgs, skips: &Skips) -> Result<Report> {
    let (mut of_ci, named): (Vec<&Lane>, Vec<&Lane>) =
        args.selected()?.into_iter().partition(|lane| lane.runs_in_ci);
    // The lanes that boot machines are the last of the table, and ask for the compiler before the others. Only the tests with four control
    // planes begin earlier, because a node that boots beside them is too slow.
    of_ci.reverse();
    of_ci.sort_by_key(|lane| lane.lane != "apiserver");
    let args = &args.of_lanes;
    // A text of --only that is the name of a part selects all its tests.
    let is_part = |text: &String| named.iter().any(|lane| lane.part == Some(text));
    let texts: Vec<String> = args.only.iter().filter(|text| !is_part(text)).cloned().collect();
    let selection = Selection { args, texts: &texts, skips };
    let run = |lane| Box::pin(run_lane(session, lane, selection));
    // Most lanes wait for others most of the time: the API server, a node, the compiler. Those that run only if they are named fill the
    // machine.
    let mut reports: Vec<(&Lane, Report)> =
        futures::stream::iter(of_ci).map(run).buffered(LANES.len()).collect().await;
    for lane in named {
        reports.push(run(lane).await);
    }
    record_times(session, selection, &reports);
    let mut report = Report::new();
    reports.into_iter().for_each(|(_, cases)| report.append(cases));
    if !session.cancel.is_cancelled() {
        if texts.is_empty() {
            skips.require_checks(&mut report);
        }
        require_matches(&texts, &mut report);
    }
    Ok(report)
}

/// The tests of the selected lanes that run.
#[derive(Clone, Copy)]
struct Selection<'a> {
    args: &'a LaneArgs,
    /// Parts of the names of tests. Without them, all tests run.
    texts: &'a [String],
    skips: &'a Skips,
}

/// Runs one lane. A lane that cannot run is a failed case.
async fn run_lane<'l>(session: &Session, lane: &'l Lane, selection: Selection<'_>) -> (&'l Lane, Report) {
    if session.cancel.is_cancelled() {
        let mut cases = Report::new();
        cases.push(lane.suite(), "run the lane", Outcome::NotRun, None);
        return (lane, cases);
    }
    let started = Instant::now();
    let result = async {
        let _lock = if lane.on_cluster { Some(session.exclusive("e2e").await?) } else { None };
        // A node keeps a processor busy. The longest lane takes it before it builds anything.
        let _processor = if lane.on_cluster { session.processor().await } else { None };
        (lane.run)(session, selection.args).await
    };
    let mut cases = with_failure(result.await, lane.suite(), "run the lane", started);
    selection.skips.judge(&mut cases);
    // With a text, other lanes may have the selected tests.
    if selection.texts.is_empty() {
        cases = require_pass(lane.suite(), cases);
    }
    if let Some(part) = lane.part {
        cases.prefix_suites(part);
    }
    cases.cases.iter_mut().for_each(|case| case.lane = Some(lane.title()));
    // Failures are printed now, because the table at the end may be an hour away.
    let (summary, time) = (cases.summary(), started.elapsed());
    session.progress.line(format!(
        "lane {}: {summary} in {}{}",
        lane.title(),
        seconds(time),
        cases.failures()
    ));
    cases.lanes.push(Timed { name: lane.title(), time });
    (lane, cases)
}

/// Records the time of each lane that ran all its tests and succeeded, for the next list.
fn record_times(session: &Session, selection: Selection<'_>, reports: &[(&Lane, Report)]) {
    let given = LaneOption::given(selection.args);
    if !selection.texts.is_empty() || given.iter().any(|option| *option != LaneOption::Only) {
        return;
    }
    let concurrent = reports.iter().filter(|(lane, _)| lane.runs_in_ci).count() > 1;
    for (lane, cases) in reports.iter().filter(|(_, cases)| cases.succeeded()) {
        let kind = if concurrent && lane.runs_in_ci { BESIDE_OTHERS } else { "lane" };
        if let Some(timed) = cases.lanes.first() {
            record_time(session, kind, &lane.title(), timed.time);
        }
    }
}

/// Fetches and builds what only some lanes need.
pub(crate) async fn fetch(session: &Session) -> Result<()> {
    dependencies::CARGO_DENY.prepare(session).await?;
    for program in kernel::DEBIAN_PROGRAMS {
        program.files(session).await?;
    }
    go_build::build(session, &sanity::CSI_TEST).await.map(drop)
}

/// Adds a failure for each text of --only that is in the name of no test that ran, and is the name of no part of a lane.
fn require_matches(only: &[String], report: &mut Report) {
    for text in only {
        let is_matched = report.cases.iter().any(|case| {
            case.has_run()
                && case.name != MACHINE
                && (case.name.contains(text) || case.suite.ends_with(&format!(": {text}")))
        });
        if !is_matched {
            let why = "no test of the selected lanes has this text in its name".to_owned();
            report.push("--only", text, Outcome::Failed(why), None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each text of `--only` must select a test that runs.
    #[test]
    fn text_without_matching_test_fails() {
        for (text, failed) in [("quota", 0), ("chart", 0), ("quotta", 1), ("machine", 1), ("storm", 1)] {
            let mut report = Report::new();
            for (suite, name) in
                [("kernel a: loopfs", "quota::limit"), ("apiserver: chart", "renders"), ("kernel a", MACHINE)]
            {
                report.push(suite, name, Outcome::Passed, None);
            }
            report.push("kernel a", "restart_storm::", Outcome::Skipped("elsewhere".into()), None);
            require_matches(&["quota".to_owned(), text.to_owned()], &mut report);
            assert_eq!(report.failed(), failed, "{text}: {report:?}");
        }
    }
}
