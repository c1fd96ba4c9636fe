//! The progress of a machine, and how it ended.

/// The progress of a machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    /// PID 1 has not reported yet.
    Booting,
    /// PID 1 runs.
    Started,
    /// The node has completed all its steps.
    Ready,
    Ended(ExitReason),
}

/// How a machine ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ExitReason {
    Passed,
    /// The guest reported a failure, with this text.
    Failed(String),
    /// The kernel crashed, or the guest sent no verdict. The text has the reason and the end of the console.
    Crashed(String),
}
