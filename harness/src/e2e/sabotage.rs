//! A sabotage: a change of the environment while a story runs. The story must fail and name the change.
//!
//! A test that cannot fail proves nothing. A sabotage changes the node or objects of the API, never the product or the story.

use anyhow::Result;
use futures::future::LocalBoxFuture;

use crate::test_env::environment::TestEnv;

/// Changes the environment.
pub(super) type Change = for<'a> fn(&'a TestEnv<'a>) -> LocalBoxFuture<'a, Result<()>>;

/// A change that a story must notice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sabotage {
    /// The value of `--break`.
    pub(super) name: &'static str,
    /// One line for users.
    pub(super) about: &'static str,
    pub(super) story: &'static str,
    /// The end of a step's title. The change is made directly before the first such step.
    pub(super) before: &'static str,
    pub(super) change: Change,
    /// Repairs what neither a new installation of the driver nor the deletion of the namespace repairs.
    pub(super) repair: Option<Change>,
    /// The words that the failure must contain, so that its reader knows what to repair.
    pub(super) expected: &'static [&'static str],
}

impl Sabotage {
    /// Returns the title of the change in the report.
    pub(super) fn title(&self) -> String {
        format!("break: {}", self.name)
    }
}
