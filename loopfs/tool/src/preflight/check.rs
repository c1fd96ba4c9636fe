//! The result of a check.

use crate::data_disk::Problem;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The machine has everything of this check that loopfs needs.
    Ok,
    /// loopfs works, but not all of its features, or not for all other programs of the node.
    Warning,
    /// loopfs does not work without it.
    Missing,
    /// The check was not possible. [`Check::found`] says why.
    NotChecked,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    /// The name, as the README lists it.
    pub(crate) id: &'static str,
    pub(crate) found: String,
    pub(crate) status: Status,
    /// What to do: a command, or a sentence. `None` if there is nothing to do.
    pub(crate) remedy: Option<String>,
}

impl Check {
    pub(super) fn ok(id: &'static str, found: impl Into<String>) -> Self {
        Self { id, found: found.into(), status: Status::Ok, remedy: None }
    }

    pub(super) fn warning(id: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { id, found: found.into(), status: Status::Warning, remedy: Some(remedy.into()) }
    }

    pub(super) fn missing(id: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { id, found: found.into(), status: Status::Missing, remedy: Some(remedy.into()) }
    }

    pub(super) fn not_checked(id: &'static str, reason: impl Into<String>) -> Self {
        Self { id, found: reason.into(), status: Status::NotChecked, remedy: None }
    }

    pub(super) fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// Returns the check with this status that reports a problem of the data disk.
    pub(super) fn problem(id: &'static str, status: Status, problem: Problem) -> Self {
        Self { id, found: problem.problem, status, remedy: Some(problem.remedy) }
    }
}
