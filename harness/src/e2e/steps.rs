//! A story is a list of steps that build on each other. The first step that fails ends the story.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Deserialize;
use testvm::excerpt::excerpt;
use testvm::report::{Outcome, Report};
use testvm::session::Session;

/// A running story, which adds its steps to the report.
pub(super) struct Steps<'a> {
    session: &'a Session,
    report: &'a mut Report,
    name: &'static str,
    shown: bool,
}

/// The error of a story whose step failed. The report has the reason.
#[derive(Debug)]
pub(super) struct StepFailed;

/// The result of a step or of a story.
pub(super) type StepResult<T = ()> = Result<T, StepFailed>;

impl<'a> Steps<'a> {
    pub(super) fn begin(session: &'a Session, report: &'a mut Report, name: &'static str) -> Steps<'a> {
        Steps { session, report, name, shown: true }
    }

    /// Begins a story without progress lines, for runs that have to fail.
    pub(super) fn begin_hidden(
        session: &'a Session,
        report: &'a mut Report,
        name: &'static str,
    ) -> Steps<'a> {
        Steps { session, report, name, shown: false }
    }

    pub(super) fn session(&self) -> &'a Session {
        self.session
    }

    /// Runs one step and adds it to the report. A step that fails or is stopped by Ctrl-C ends the story.
    pub(super) fn step<T>(
        &mut self,
        title: &str,
        work: impl Future<Output = Result<T>>,
    ) -> impl Future<Output = StepResult<T>> {
        // Called before the future below is made, which therefore has no place for `work`, only for its address.
        let work = self.session.until_cancelled(work);
        async move {
            let shown = self.shown.then(|| self.session.progress.step(format!("{}: {title}", self.name)));
            let started = Instant::now();
            let result = work.await;
            self.report.record(self.name, title, started.elapsed(), &result);
            match result {
                Ok(value) => {
                    if let Some(step) = shown {
                        step.done("");
                    }
                    Ok(value)
                }
                Err(error) => {
                    if let Some(step) = shown {
                        step.failed(excerpt(&format!("{error:#}")));
                    }
                    self.report.push(self.name, "remaining steps", Outcome::NotRun, Duration::ZERO);
                    Err(StepFailed)
                }
            }
        }
    }

    /// Records that a step does not apply to this cluster.
    pub(super) fn skip(&mut self, title: &str, reason: &str) {
        self.report.push(self.name, title, Outcome::Skipped(reason.to_owned()), Duration::ZERO);
    }
}

/// A case of a report, as the background process prints it.
#[derive(Debug, Deserialize)]
pub(super) struct HandedOver {
    suite: String,
    name: String,
    outcome: String,
    #[serde(default)]
    message: String,
    seconds: Option<f64>,
}

/// Builds the report from the cases of the background process.
pub(super) fn report_of(cases: Vec<HandedOver>) -> Report {
    let mut report = Report::new();
    for case in cases {
        let outcome = match case.outcome.as_str() {
            "passed" => Outcome::Passed,
            "expected-failure" => Outcome::ExpectedFailure(case.message),
            "skipped" => Outcome::Skipped(case.message),
            "unavailable" => Outcome::Unavailable(case.message),
            "not-run" => Outcome::NotRun,
            // An unknown outcome must not count as passed.
            _ => Outcome::Failed(case.message),
        };
        report.push(&case.suite, &case.name, outcome, case.seconds.map(Duration::from_secs_f64));
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_the_hand_over() {
        let mut report = Report::new();
        for outcome in [
            Outcome::Passed,
            Outcome::Failed("why".into()),
            Outcome::ExpectedFailure("known".into()),
            Outcome::Skipped("n/a".into()),
            Outcome::Unavailable("no tool".into()),
            Outcome::NotRun,
        ] {
            report.push("suite", "case", outcome, Duration::from_millis(1500));
        }
        let line = serde_json::to_string(&report.cases).unwrap();
        let again = report_of(serde_json::from_str(&line).unwrap());
        let outcomes =
            |report: &Report| report.cases.iter().map(|case| case.outcome.clone()).collect::<Vec<_>>();
        assert_eq!(outcomes(&again), outcomes(&report));
        assert_eq!(again.cases[0].time, Some(Duration::from_millis(1500)));
    }
}
