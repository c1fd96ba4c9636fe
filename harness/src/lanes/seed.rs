//! The seed of the random tests, which repeats their choices.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use testvm::process::{self, Program};
use testvm::session::Session;

/// The variable with the seed. Someone who sets it repeats an earlier run.
pub(super) const SEED: &str = "LOOPFS_TEST_SEED";
/// That of proptest, which its properties read themselves.
const OF_PROPERTIES: &str = "PROPTEST_RNG_SEED";

/// What chooses the seed, unless [`SEED`] is set.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// Two runs of a commit make the same choices, so that a failure belongs to the commit.
    Commit,
    /// Each run makes other choices, to find what no commit has chosen.
    Clock,
}

/// Returns the seed of a lane, and prints it.
pub(super) async fn choose(session: &Session, lane: &str, source: Source) -> Result<u64> {
    let (seed, chosen_by) = match (std::env::var(SEED), source) {
        (Ok(text), _) => {
            (text.parse().with_context(|| format!("{SEED} is {text:?}; it can be a number"))?, "the variable")
        }
        (Err(_), Source::Commit) => match commit(session).await {
            Some(seed) => (seed, "the commit"),
            None => (0, "no commit, because git names none"),
        },
        (Err(_), Source::Clock) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
            (now.as_secs(), "the clock")
        }
    };
    session.progress.line(format!("random tests of the lane {lane}: {SEED}={seed}, the seed of {chosen_by}"));
    Ok(seed)
}

/// Returns the variables of programs with random tests.
pub(super) fn variables(seed: u64) -> [(String, String); 2] {
    [SEED, OF_PROPERTIES].map(|name| (name.to_owned(), seed.to_string()))
}

/// Sets them for a program.
pub(super) fn set(program: Program, seed: u64) -> Program {
    variables(seed).into_iter().fold(program, |program, (name, value)| program.env(name, value))
}

/// Returns a number that depends on the commit of the checkout.
async fn commit(session: &Session) -> Option<u64> {
    let git = process::git(session.workspace.root()).args(["rev-parse", "--short=12", "HEAD"]);
    let printed = git.run().await.ok()?.stdout;
    u64::from_str_radix(printed.trim(), 16).ok()
}
