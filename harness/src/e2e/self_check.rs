//! Sabotages each story in turn on one cluster. The check passes only if each story fails, and its failure names the sabotage.

use std::time::Instant;

use anyhow::{Context, Result};
use testvm::excerpt::excerpt;
use testvm::report::{Case, Outcome, Report};
use testvm::session::Session;
use testvm::steps::{StepFailed, StepResult};

use super::runner::{Plan, StoryRunner};
use super::stories::{install, removal, sabotages};
use super::story::{Broken, Story};
use crate::test_env::environment::TestEnv;

const NAME: &str = "self-check";

/// Adds two cases per sabotage of a selected story to the report: the story fails, and the cluster is repaired.
pub(super) async fn run(session: &Session, report: &mut Report, env: &TestEnv<'_>, plan: Plan<'_>) {
    let mut inner = Report::new();
    let runner = StoryRunner::begin(session, &mut inner, env, plan).await.hidden();
    let mut check = SelfCheck { env, runner };
    let mut works = record(session, report, "install the driver", check.prepare()).await;
    for broken in sabotages().filter(|(story, _)| plan.selection.asks_for(story)) {
        let (story, sabotage) = broken;
        let title = format!("--break {}: {} fails", sabotage.name, story.name);
        if !works {
            report.push(NAME, &title, Outcome::NotRun, None);
            continue;
        }
        record(session, report, &title, check.notices(broken)).await;
        let title = format!("--break {}: repaired", sabotage.name);
        works = record(session, report, &title, check.repair(broken)).await;
    }
    if works {
        record(session, report, "nothing is left", check.pass(&removal::STORY)).await;
    }
}

/// Adds a case to the report, and returns `true` if it passed. The line about it ends with the text that `work` returns.
async fn record(
    session: &Session,
    report: &mut Report,
    title: &str,
    work: impl Future<Output = Result<String>>,
) -> bool {
    let step = session.progress.step(format!("{NAME}: {title}"));
    let started = Instant::now();
    let result = session.until_cancelled(work).await;
    report.record(NAME, title, started.elapsed(), &result);
    match &result {
        Ok(text) => step.done(excerpt(text)),
        Err(error) => step.failed(excerpt(&format!("{error:#}"))),
    }
    result.is_ok()
}

struct SelfCheck<'a> {
    env: &'a TestEnv<'a>,
    runner: StoryRunner<'a>,
}

impl SelfCheck<'_> {
    async fn prepare(&mut self) -> Result<String> {
        self.pass(&install::STORY).await?;
        let first = self.runner.cases().len();
        let created = self.runner.create_namespace().await;
        self.result(first, created)
    }

    /// Runs the story of the sabotage, and returns its failure.
    async fn notices(&mut self, broken: Broken) -> Result<String> {
        let first = self.runner.cases().len();
        self.runner.sabotage(Some(broken));
        let outcome = self.runner.run_story(broken.0).await;
        self.runner.sabotage(None);
        judge(&self.runner.cases()[first..], broken, outcome.is_err())
    }

    /// Installs the driver again, because the sabotage may have changed it, or the kubelet may delay its next restart. Then removes what the story
    /// left.
    async fn repair(&mut self, (story, sabotage): Broken) -> Result<String> {
        self.env.timeouts.restore();
        if let Some(repair) = sabotage.repair {
            repair(self.env).await.context("undo the sabotage")?;
        }
        install::stop(self.env).await?;
        self.pass(&install::STORY).await?;
        let first = self.runner.cases().len();
        let cleaned = self.runner.clean_up(story).await;
        self.result(first, cleaned)
    }

    /// Runs a story that must pass.
    async fn pass(&mut self, story: &Story) -> Result<String> {
        let first = self.runner.cases().len();
        let outcome = self.runner.run_story(story).await;
        self.result(first, outcome)
    }

    /// Returns the first failure from case `first` on as an error.
    fn result(&self, first: usize, outcome: StepResult) -> Result<String> {
        match outcome {
            Ok(()) => Ok(String::new()),
            Err(StepFailed) => Err(failure(&self.runner.cases()[first..])),
        }
    }
}

/// Returns the first failure after the sabotage, which must contain the words that name it.
fn judge(cases: &[Case], (story, sabotage): Broken, failed: bool) -> Result<String> {
    let title = sabotage.title();
    let changed = cases.iter().position(|case| case.name == title && case.outcome == Outcome::Passed);
    let Some(changed) = changed else {
        anyhow::ensure!(!failed, "the story failed before the sabotage: {:#}", failure(cases));
        anyhow::bail!("the story has no step {:?}", sabotage.before);
    };
    anyhow::ensure!(failed, "{} passed", story.name);
    let failure = failure(&cases[changed..]).to_string();
    let missing: Vec<_> = sabotage.expected.iter().filter(|word| !failure.contains(**word)).collect();
    anyhow::ensure!(missing.is_empty(), "the failure does not contain {missing:?}: {failure}");
    Ok(failure)
}

/// Returns the first failure as an error.
fn failure(cases: &[Case]) -> anyhow::Error {
    let failed = cases.iter().find_map(|case| match &case.outcome {
        Outcome::Failed(why) => Some(anyhow::anyhow!("{}: {}: {why}", case.suite, case.name)),
        _ => None,
    });
    failed.unwrap_or_else(|| anyhow::anyhow!("nothing failed"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::noticed(&["-list", "-break: quota", "!ready: prjquota of /var/lib/loopfs/data"], Ok(()))]
    #[case::passed(&["-list", "-break: quota", "-ready"], Err("install passed"))]
    #[case::too_early(&["!list: prjquota"], Err("failed before the sabotage"))]
    #[case::not_changed(&["-list", "!break: quota: no mount"], Err("failed before the sabotage"))]
    #[case::no_such_step(&["-list", "-ready"], Err("has no step"))]
    #[case::for_another_reason(&["-break: quota", "!ready: no pod"], Err("does not contain [\"prjquota\""))]
    fn only_the_expected_failure_counts(#[case] cases: &[&str], #[case] expected: Result<(), &str>) {
        let mut report = Report::new();
        for case in cases {
            let (outcome, case) = case.split_at(1);
            let outcome = if outcome == "!" { Outcome::Failed(case.to_owned()) } else { Outcome::Passed };
            report.push("install", case.split(": no").next().unwrap(), outcome, None);
        }
        let failed = !report.succeeded();
        let judged = judge(&report.cases, sabotages().next().unwrap(), failed);
        match (judged, expected) {
            (Ok(failure), Ok(())) => assert!(failure.contains("prjquota"), "{failure}"),
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (judged, _) => panic!("{judged:?}"),
        }
    }
}
