//! The test lanes, ordered by cost: the first run on any machine in seconds, the last needs a cluster.

mod apiserver;
mod chart;
mod checks;
mod clusters;
mod conformance;
mod dependencies;
mod docker;
mod ginkgo;
mod go_tests;
mod image;
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
use testvm::go_build;
use testvm::progress::seconds;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::test_machine::MACHINE;
use testvm::vm::report_repeated_boots;

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
    for lane in args.selected()? {
        if session.cancel.is_cancelled() {
            report.push(lane.name(), "run the lane", Outcome::NotRun, Duration::ZERO);
            continue;
        }
        let started = Instant::now();
        let result = match lane {
            Lane::Unit => unit::run(session).await,
            Lane::Apiserver => apiserver::run(session, &args.e2e.kubernetes().source(), &args.only).await,
            Lane::Kernel => kernel::run(session, args.e2e.kernel(), &args.only).await,
            Lane::Sanity => sanity::run(session, args.e2e.kernel()).await,
            Lane::Docker => docker::run(session, &args.only).await,
            Lane::E2e => run_e2e(session, args.e2e.clone()).await,
            Lane::LongStories => run_long_stories(session, args.e2e.kubernetes()).await,
            Lane::OtherProjects => run_other_projects(session, args.e2e.kubernetes()).await,
            Lane::SelfCheck => run_self_check(session, args.e2e.kubernetes()).await,
            Lane::Node => node::run(session, args.e2e.kubernetes(), args.e2e.kernel()).await,
            Lane::Versions => versions::run(session).await,
            Lane::Kind => run_kind(session, args.e2e.kubernetes()).await,
            Lane::Upgrade => run_upgrade(session, args.e2e.kubernetes()).await,
            Lane::Conformance => {
                let selection = conformance::Selection::new(args.quick, &args.only);
                conformance::run(session, &args.e2e.kubernetes().source(), &selection).await
            }
            Lane::SecondDriver => second_driver::run(session, &args.e2e.kubernetes().source()).await,
            Lane::Image => image::run(session).await,
        };
        let mut cases = result.unwrap_or_else(|error| {
            let outcome = Outcome::Failed(format!("{error:#}"));
            let mut cases = Report::new();
            cases.push(lane.name(), "run the lane", outcome, started.elapsed());
            cases
        });
        skips.judge(&mut cases);
        // With --only, other lanes may have the selected tests.
        if args.only.is_empty() {
            cases = require_pass(lane.name(), cases);
        }
        report_repeated_boots(lane.name(), &mut cases);
        // Failures are printed now, because the table at the end may be an hour away.
        let (summary, time) = (cases.summary(), seconds(started.elapsed()));
        session.progress.line(format!("lane {}: {summary} in {time}{}", lane.name(), cases.failures()));
        report.append(cases);
    }
    if !session.cancel.is_cancelled() {
        if args.only.is_empty() {
            skips.require_checks(&mut report);
        }
        require_matches(&args.only, &mut report);
    }
    Ok(report)
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
