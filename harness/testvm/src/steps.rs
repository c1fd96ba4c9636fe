//! The steps of a run, which build on each other: each is shown while it runs, and is a case of the report. The first step that fails
//! ends the run.

use std::time::Instant;

use anyhow::Result;
use futures::future::LocalBoxFuture;

use crate::excerpt::excerpt;
use crate::report::{Outcome, Report};
use crate::session::Session;

/// The steps of one suite of the report.
#[must_use]
pub struct Steps<'a> {
    session: &'a Session,
    report: &'a mut Report,
    suite: &'static str,
    shown: bool,
    insertion: Option<Insertion<'a>>,
}

/// A step of another owner.
struct Insertion<'a> {
    title: String,
    /// The end of the title of the step before which this one runs.
    before: &'a str,
    begin: &'a dyn Fn() -> LocalBoxFuture<'a, Result<()>>,
}

/// The error of a run whose step failed. The report has the reason.
#[derive(Debug)]
pub struct StepFailed;

/// The result of a step or of a run.
pub type StepResult<T = ()> = Result<T, StepFailed>;

impl<'a> Steps<'a> {
    /// Begins a run that adds its steps to `report`.
    pub fn begin(session: &'a Session, report: &'a mut Report, suite: &'static str) -> Steps<'a> {
        Steps { session, report, suite, shown: true, insertion: None }
    }

    /// Hides the progress lines, because the run has to fail.
    pub fn hidden(self) -> Steps<'a> {
        Steps { shown: false, ..self }
    }

    /// Inserts a step directly before the first one whose title ends with `before`. `begin` returns its work.
    pub fn inserting(
        self,
        title: String,
        before: &'a str,
        begin: &'a dyn Fn() -> LocalBoxFuture<'a, Result<()>>,
    ) -> Steps<'a> {
        Steps { insertion: Some(Insertion { title, before, begin }), ..self }
    }

    /// Returns the session.
    pub fn session(&self) -> &'a Session {
        self.session
    }

    /// Runs one step and adds it to the report. A step that fails or is stopped by Ctrl-C ends the run.
    pub fn step<T>(
        &mut self,
        title: &str,
        work: impl Future<Output = Result<T>>,
    ) -> impl Future<Output = StepResult<T>> {
        self.judged(title, work, |_| Outcome::Passed)
    }

    /// Runs one step like [`Steps::step`]. `judge` decides about the value of a step that did not fail. It does not end the run.
    pub fn judged<T>(
        &mut self,
        title: &str,
        work: impl Future<Output = Result<T>>,
        judge: impl FnOnce(&T) -> Outcome,
    ) -> impl Future<Output = StepResult<T>> {
        // Called before the future below is made, which therefore has no place for `work`, only for its address.
        let work = self.session.until_cancelled(work);
        let insertion = self.insertion.take_if(|insertion| title.ends_with(insertion.before));
        async move {
            if let Some(Insertion { title, begin, .. }) = insertion {
                let work = self.session.until_cancelled(begin());
                self.run(&title, work, |()| Outcome::Passed).await?;
            }
            self.run(title, work, judge).await
        }
    }

    async fn run<T>(
        &mut self,
        title: &str,
        work: impl Future<Output = Result<T>>,
        judge: impl FnOnce(&T) -> Outcome,
    ) -> StepResult<T> {
        let shown = self.shown.then(|| self.session.progress.step(format!("{}: {title}", self.suite)));
        let started = Instant::now();
        let result = work.await;
        let outcome = match &result {
            Ok(value) => judge(value),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        if let Some(step) = shown {
            match &outcome {
                Outcome::Failed(why) => step.failed(excerpt(why)),
                _ => step.done(""),
            }
        }
        self.report.push(self.suite, title, outcome, started.elapsed());
        result.map_err(|_in_report| {
            self.report.push(self.suite, "remaining steps", Outcome::NotRun, None);
            StepFailed
        })
    }

    /// Records that a step does not apply to this cluster.
    pub fn skip(&mut self, title: &str, reason: &str) {
        self.report.push(self.suite, title, Outcome::Skipped(reason.to_owned()), None);
    }
}
