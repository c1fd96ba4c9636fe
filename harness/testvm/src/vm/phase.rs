//! The progress of a machine, and how it ended.

use anyhow::Result;

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
    /// The guest reported success, its kernel logged no fault, and its XFS disks are consistent.
    Passed,
    /// The guest reported a failure, with this text.
    Failed(String),
    /// The kernel logged a fault, or a disk is corrupt. The text names them, and the failure that the guest reported, if any.
    Faulty(String),
    /// The kernel crashed, or the guest sent no verdict. The text has the reason and the end of the console.
    Crashed(String),
}

impl ExitReason {
    /// Returns the text of any end but [`ExitReason::Passed`].
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        match self {
            ExitReason::Passed => None,
            ExitReason::Failed(why) | ExitReason::Faulty(why) | ExitReason::Crashed(why) => Some(why),
        }
    }

    /// Returns an error with the name of the machine for any end but [`ExitReason::Passed`].
    pub(super) fn success(&self, machine: &str) -> Result<()> {
        match self.failure() {
            None => Ok(()),
            Some(why) => anyhow::bail!("{machine}: {why}"),
        }
    }

    /// Returns this end with the faults that were found after it.
    pub(super) fn with_faults(self, faults: &[String]) -> ExitReason {
        if faults.is_empty() {
            return self;
        }
        let reported = self.failure().map(|why| format!("the guest reported: {why}"));
        ExitReason::Faulty(faults.iter().cloned().chain(reported).collect::<Vec<_>>().join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of the verdict is kept.
    #[test]
    fn fault_outweighs_the_verdict() {
        let faults = ["the disk data: corrupt".to_owned()];
        assert_eq!(ExitReason::Passed.with_faults(&[]), ExitReason::Passed);
        assert_eq!(ExitReason::Failed("a".into()).with_faults(&[]), ExitReason::Failed("a".into()));
        assert_eq!(ExitReason::Passed.with_faults(&faults), ExitReason::Faulty(faults[0].clone()));
        let both = ExitReason::Failed("a test failed".into()).with_faults(&faults);
        assert_eq!(both.failure(), Some("the disk data: corrupt\nthe guest reported: a test failed"));
    }
}
