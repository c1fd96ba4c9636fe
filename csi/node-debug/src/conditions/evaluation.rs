//! The result of a condition.

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evaluation {
    pub(crate) met: bool,
    /// One line.
    pub(crate) detail: String,
}

impl Evaluation {
    pub(super) fn met(detail: impl Into<String>) -> Self {
        Self { met: true, detail: detail.into() }
    }

    pub(super) fn not_met(detail: impl Into<String>) -> Self {
        Self { met: false, detail: detail.into() }
    }
}
