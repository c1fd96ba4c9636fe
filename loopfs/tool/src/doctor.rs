//! `loopfs doctor`: reports what a machine lacks for loopfs, and what to do about it.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::output::{Output, Side, Table, counted, object};
use crate::preflight::{self, Check, Status};

/// Check whether loopfs can work on this machine, and print what to do if it cannot
///
/// Run it where loopfs is to run: on the node, or in the container of the driver, whose image has it as /loopfs. It changes
/// nothing: it loads no module, mounts nothing and attaches nothing. If one of the directories has an automount, the kernel mounts
/// it. Without root, it reports what it could not see as `not checked`.
///
/// STATUS is `ok`, `warning` (loopfs works, with the restriction that FOUND names), `missing` (loopfs does not work), or `not
/// checked` (FOUND says why). The remedies follow the table, each a command or a sentence. The exit code is 0 if nothing is
/// missing, and 1 if something is.
///
/// JSON: {"missing": number, "checks": [{"id", "status": "ok" | "warning" | "missing" | "not_checked", "found", "remedy" | null}]}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Doctor {
    /// The mount point of the file system of the volumes: checks its type, options, quotas, features and space
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,
    /// The kubelet's directory, such as /var/lib/kubelet: checks its path and the propagation of its mounts
    #[arg(long, value_name = "DIRECTORY")]
    kubelet_dir: Option<PathBuf>,
}

impl Doctor {
    pub(crate) fn run(&self) -> Result<Output> {
        report(&preflight::check(self.data_dir.as_deref(), self.kubelet_dir.as_deref()))
    }
}

fn report(checks: &[Check]) -> Result<Output> {
    let missing = checks.iter().filter(|check| check.status == Status::Missing).count();
    let json: Vec<_> = checks
        .iter()
        .map(|Check { id, found, status, remedy }| {
            object! { id: id, status: name(*status), found: found, remedy: remedy }
        })
        .collect();
    let output = Output::new(text(checks, missing), &object! { missing: missing, checks: json })?;
    Ok(output.good(missing == 0))
}

/// Returns the name of a status in JSON. The table has a space instead of the `_`.
fn name(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Missing => "missing",
        Status::NotChecked => "not_checked",
    }
}

fn text(checks: &[Check], missing: usize) -> String {
    let mut table = Table::new([("CHECK", Side::Left), ("STATUS", Side::Left), ("FOUND", Side::Left)]);
    for check in checks {
        table.row([check.id.to_owned(), name(check.status).replace('_', " "), check.found.clone()]);
    }
    let mut text = table.print();
    let remedies = || checks.iter().filter_map(|check| Some((check.id, check.remedy.as_deref()?)));
    if remedies().next().is_some() {
        text.push('\n');
        let mut table = Table::new([("CHECK", Side::Left), ("REMEDY", Side::Left)]);
        remedies().for_each(|(id, remedy)| table.row([id.to_owned(), remedy.to_owned()]));
        text.push_str(&table.print());
    }
    let unchecked = checks.iter().filter(|check| check.status == Status::NotChecked).count();
    text.push_str(&format!("\n{}\n", verdict(checks.len(), missing, unchecked)));
    text
}

/// Returns the last line. Checks that were not possible prove nothing.
fn verdict(checks: usize, missing: usize, unchecked: usize) -> String {
    match (missing, unchecked) {
        (0, 0) => "nothing that loopfs needs is missing".to_owned(),
        (0, _) => {
            format!(
                "{} found nothing missing; {unchecked} not possible",
                counted(checks - unchecked, "check")
            )
        }
        _ => format!("loopfs does not work here: {} found something missing", counted(missing, "check")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_checks_prove_nothing() {
        assert_eq!(verdict(22, 0, 0), "nothing that loopfs needs is missing");
        assert_eq!(verdict(22, 0, 1), "21 checks found nothing missing; 1 not possible");
        assert_eq!(verdict(22, 1, 3), "loopfs does not work here: 1 check found something missing");
    }
}
