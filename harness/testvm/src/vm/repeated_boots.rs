//! The boots of virtual machines that this process repeated. A fault of the emulator must not fail a run, and must not become usual.

use std::sync::{Mutex, PoisonError};

use crate::excerpt::list;
use crate::report::{Outcome, Report};

/// The number of boots that one run may repeat.
const MAX_REPEATED: usize = 3;

static REPEATED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Prints and records that a machine is booted again, and why.
pub(super) fn record(why: String) {
    eprintln!("{why}");
    REPEATED.lock().unwrap_or_else(PoisonError::into_inner).push(why);
}

/// Adds the boots that were repeated to the report, as a case that fails if there were too many.
pub fn report_repeated_boots(suite: &str, report: &mut Report) {
    let repeated = std::mem::take(&mut *REPEATED.lock().unwrap_or_else(PoisonError::into_inner));
    judge(suite, &repeated, report);
}

fn judge(suite: &str, repeated: &[String], report: &mut Report) {
    if repeated.is_empty() {
        return;
    }
    let outcome = match repeated.len() {
        ..=MAX_REPEATED => Outcome::Passed,
        _ => Outcome::Failed(format!("machines were booted again: {}", list(repeated))),
    };
    report.push(
        suite,
        &format!("boots repeated: {} of at most {MAX_REPEATED}", repeated.len()),
        outcome,
        None,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(repeated: usize) -> Vec<(String, Outcome)> {
        let repeated: Vec<String> = (0..repeated).map(|number| format!("node-{number} aborted")).collect();
        let mut report = Report::new();
        judge("kernel", &repeated, &mut report);
        report.cases.into_iter().map(|case| (case.name, case.outcome)).collect()
    }

    #[test]
    fn repeated_boots_are_counted_and_limited() {
        assert_eq!(outcomes(0), []);
        assert_eq!(outcomes(3), [("boots repeated: 3 of at most 3".to_owned(), Outcome::Passed)]);
        let [(name, Outcome::Failed(why))] = &outcomes(4)[..] else { panic!("{:?}", outcomes(4)) };
        assert!(name == "boots repeated: 4 of at most 3" && why.contains("node-3 aborted"), "{name} {why}");
    }
}
