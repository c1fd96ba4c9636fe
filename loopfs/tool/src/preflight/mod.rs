//! The check of a machine before loopfs runs on it: what is missing, and what to do about it.
//!
//! [`check()`] works on any machine, in any container and as any user. It changes nothing: it loads no module, mounts nothing and
//! attaches nothing. The one exception is a directory with an automount, which the kernel mounts when a process opens it.
//! One module gathers facts, and pure functions judge them.

mod check;
mod data_dir;
mod facts;
mod gather;
mod host;
mod kubelet;
mod machine;
mod read;

use std::path::Path;

pub(crate) use check::{Check, Status};
use facts::Facts;

/// Checks this machine as this process sees it. A fact that the process may not read is [`Status::NotChecked`].
pub(crate) fn check(data_dir: Option<&Path>, kubelet_dir: Option<&Path>) -> Vec<Check> {
    judge(&Facts::gather(data_dir, kubelet_dir))
}

fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = machine::judge(facts);
    checks.extend(host::judge(&facts.host, facts.max_part));
    let kubelet_dir = facts.kubelet.as_ref().map(|kubelet| kubelet.path.as_path());
    checks.extend(data_dir::judge(facts.data_dir.as_ref(), kubelet_dir));
    checks.extend(kubelet::judge(facts.kubelet.as_ref()));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts the status of a check, and that its remedy contains a text. If the text is empty, there must be no remedy.
    #[track_caller]
    pub(super) fn assert_check(checks: &[Check], id: &str, status: Status, remedy: &str) {
        let check = checks.iter().find(|check| check.id == id).unwrap();
        assert_eq!(check.status, status, "{check:?}");
        assert_eq!(check.remedy.is_none(), remedy.is_empty(), "{check:?}");
        assert!(check.remedy.as_deref().unwrap_or_default().contains(remedy), "{check:?}");
    }

    /// Returns the ids that the README lists.
    fn documented() -> Vec<&'static str> {
        let readme = include_str!("../../README.md");
        let section = readme.split("\n## doctor\n").nth(1).unwrap().split("\n## ").next().unwrap();
        let table = section.split("| check |").nth(1).unwrap();
        table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
    }

    #[test]
    fn a_complete_machine_is_ok() {
        let checks = judge(&facts::tests::complete());
        let ids: Vec<_> = checks.iter().map(|check| check.id).collect();
        assert_eq!(ids, documented());
        for check in checks {
            assert_eq!((check.status, &check.remedy), (Status::Ok, &None), "{check:?}");
        }
    }

    #[test]
    fn omitted_directories_are_not_checked() {
        let facts = Facts { data_dir: None, kubelet: None, ..facts::tests::complete() };
        let open: Vec<_> =
            judge(&facts).into_iter().filter(|check| check.status == Status::NotChecked).collect();
        assert_eq!(open.iter().map(|check| check.id).collect::<Vec<_>>(), documented()[14..]);
        assert!(open.iter().all(|check| check.found.contains("-dir")), "{open:?}");
    }

    #[test]
    fn every_problem_has_a_remedy() {
        let checks = check(Some(Path::new("/")), Some(Path::new("/no/such")));
        assert_eq!(checks.iter().map(|check| check.id).collect::<Vec<_>>(), documented());
        for check in checks {
            assert!(!check.found.is_empty(), "{check:?}");
            let problem = matches!(check.status, Status::Warning | Status::Missing);
            assert!(check.remedy.is_some() || !problem, "{check:?}");
        }
    }
}
