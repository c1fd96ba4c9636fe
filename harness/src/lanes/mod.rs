//! The test lanes, ordered by cost: the first run on any machine in seconds, the last needs a cluster.

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
mod node;
mod options;
mod passes;
mod power_cut;
mod restored_backup;
mod sanity;
mod second_driver;
mod side_by_side;
mod skips;
mod unit;
mod versions;

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::StreamExt;
use testvm::go_build;
use testvm::progress::seconds;
use testvm::report::{Outcome, Report, Timed};
use testvm::session::Session;
use testvm::test_machine::MACHINE;

use self::lane::Lane;
pub(crate) use self::lane::descriptions;
pub use self::options::TestArgs;
use self::passes::require_pass;
use self::skips::Skips;
use crate::e2e;
use crate::node_options::KubernetesOptions;

/// Runs the selected lanes, and reports each as cases of suites with its name.
///
/// # Errors
/// The options select no lane, or a selected lane does not take them. A lane that cannot run is a failed case, not an error.
pub async fn run(session: &Session, args: TestArgs) -> Result<Report> {
    let skips = Skips::read(session)?;
    let mut report = Report::new();
    for round in 1..=args.repeat.get() {
        let mut of_round = run_once(session, &args, &skips).await?;
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
    let (of_ci, named): (Vec<Lane>, Vec<Lane>) =
        args.selected()?.into_iter().partition(|lane| lane.runs_in_ci());
    let run = |lane| Box::pin(run_lane(session, lane, args, skips));
    // Most lanes wait for others most of the time: the API server, a node, the compiler. The lanes that run only if they are named fill
    // the machine.
    let mut reports: Vec<Report> =
        futures::stream::iter(of_ci).map(run).buffered(lane::ALL.len()).collect().await;
    for lane in named {
        reports.push(run(lane).await);
    }
    let mut report = Report::new();
    reports.into_iter().for_each(|cases| report.append(cases));
    if !session.cancel.is_cancelled() {
        if args.only.is_empty() {
            skips.require_checks(&mut report);
        }
        require_matches(&args.only, &mut report);
    }
    Ok(report)
}

/// Runs one lane. A lane that cannot run is a failed case.
async fn run_lane(session: &Session, lane: Lane, args: &TestArgs, skips: &Skips) -> Report {
    let mut cases = Report::new();
    if session.cancel.is_cancelled() {
        cases.push(lane.name(), "run the lane", Outcome::NotRun, None);
        return cases;
    }
    let started = Instant::now();
    let kubernetes = args.e2e.kubernetes();
    let result = match lane {
        Lane::Unit => unit::run(session).await,
        Lane::Apiserver => apiserver::run(session, &kubernetes.source(), &args.only).await,
        Lane::Kernel => {
            let kernels = args.e2e.kernel().map_or(kernel::Kernels::OfTheCommit, kernel::Kernels::One);
            kernel::run(session, kernels, &args.only).await
        }
        Lane::Kernels => kernel::run(session, kernel::Kernels::All, &[]).await,
        Lane::Sanity => sanity::run(session, args.e2e.kernel()).await,
        Lane::Docker => docker::run(session, &args.only).await,
        Lane::E2e => run_e2e(session, args.e2e.clone()).await,
        Lane::LongStories => run_long_stories(session, kubernetes).await,
        Lane::OtherProjects => run_other_projects(session, kubernetes).await,
        Lane::SelfCheck => run_self_check(session, kubernetes).await,
        Lane::Node => node::run(session, kubernetes, args.e2e.kernel()).await,
        Lane::Versions => versions::run(session).await,
        Lane::Kind => run_kind(session, kubernetes).await,
        Lane::Upgrade => run_upgrade(session, kubernetes).await,
        Lane::Conformance => {
            let selection = conformance::Selection::new(args.quick, &args.only);
            conformance::run(session, &kubernetes.source(), &selection).await
        }
        Lane::SecondDriver => second_driver::run(session, &kubernetes.source()).await,
        Lane::Image => session.until_cancelled(release::check_image(session)).await,
    };
    match result {
        Ok(report) => cases = report,
        Err(error) => cases.record::<()>(lane.name(), "run the lane", started.elapsed(), &Err(error)),
    }
    skips.judge(&mut cases);
    // With --only, other lanes may have the selected tests.
    if args.only.is_empty() {
        cases = require_pass(lane.name(), cases);
    }
    // Failures are printed now, because the table at the end may be an hour away.
    cases.cases.iter_mut().for_each(|case| case.lane = Some(lane.name().to_owned()));
    let (summary, time) = (cases.summary(), started.elapsed());
    session.progress.line(format!(
        "lane {}: {summary} in {}{}",
        lane.name(),
        seconds(time),
        cases.failures()
    ));
    cases.lanes.push(Timed { name: lane.name().to_owned(), time: Some(time) });
    cases
}

/// Fetches and builds what only some lanes need.
pub(crate) async fn fetch(session: &Session) -> Result<()> {
    dependencies::CARGO_DENY.prepare(session).await?;
    for program in kernel::DEBIAN_PROGRAMS {
        program.files(session).await?;
    }
    go_build::build(session, &sanity::CSI_TEST).await.map(drop)
}

async fn run_e2e(session: &Session, args: e2e::Args) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    // The longest lane takes its processor before it builds anything.
    let _processor = session.processor().await;
    e2e::run(session, args.without_long_stories()).await
}

async fn run_long_stories(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_long(session, kubernetes, &session.workspace.reports("long-stories")).await
}

async fn run_other_projects(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_with_other_projects(session, kubernetes, &session.workspace.reports("other-projects")).await
}

async fn run_self_check(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_self_check(session, kubernetes, &session.workspace.reports("self-check")).await
}

async fn run_kind(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_on_kind(session, &[], kubernetes, &session.workspace.reports("kind")).await
}

async fn run_upgrade(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_upgrade(session, kubernetes, &session.workspace.reports("upgrade")).await
}

/// Adds a failure for each text of --only that is in the name of no test that ran, and is the name of no part of a lane.
fn require_matches(only: &[String], report: &mut Report) {
    for text in only {
        let is_matched = report.cases.iter().any(|case| {
            let ran = !matches!(case.outcome, Outcome::Skipped(_) | Outcome::NotRun);
            ran && case.name != MACHINE
                && (case.name.contains(text) || case.suite.ends_with(&format!(": {text}")))
        });
        if !is_matched {
            let why = "no test of the selected lanes has this text in its name".to_owned();
            report.push("--only", text, Outcome::Failed(why), Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_only_that_selects_no_test_fails() {
        for (text, failed) in [("quota", 0), ("chart", 0), ("quotta", 1), ("machine", 1), ("storm", 1)] {
            let mut report = Report::new();
            for (suite, name) in
                [("kernel a: loopfs", "quota::limit"), ("apiserver: chart", "renders"), ("kernel a", MACHINE)]
            {
                report.push(suite, name, Outcome::Passed, Duration::ZERO);
            }
            report.push("kernel a", "restart_storm::", Outcome::Skipped("elsewhere".into()), Duration::ZERO);
            require_matches(&["quota".to_owned(), text.to_owned()], &mut report);
            assert_eq!(report.failed(), failed, "{text}: {report:?}");
        }
    }
}
