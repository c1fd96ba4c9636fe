//! Figures and claims for people.

use std::fmt::Write as _;

use super::claim::Claim;
use super::measurement::{Measurements, Part};

pub(super) fn measurements(all: &Measurements) -> String {
    all.parts.iter().map(part).collect::<Vec<_>>().join("\n")
}

fn part(part: &Part) -> String {
    let machine = &part.machine;
    let mut text = format!(
        "{}: Linux {}, {} x {}, {}\n",
        part.place, machine.kernel, machine.cpus, machine.cpu, machine.file_system
    );
    let width = part.rows.iter().map(|row| row.name.len()).fold(20, usize::max);
    _ = writeln!(text, "  {:<width$} {:>8} {:>12} {:>12} {:>6}  unit", "name", "n", "median", "p99", "runs");
    for row in &part.rows {
        _ = writeln!(
            text,
            "  {:<width$} {:>8} {:>12.1} {:>12.1} {:>6}  {}",
            row.name, row.n, row.median, row.p99, row.runs, row.unit
        );
    }
    text
}

pub(super) fn claims(claims: &[Claim]) -> String {
    let mut text = String::new();
    for claim in claims {
        let verdict = match claim.holds {
            Some(true) => "holds",
            Some(false) => "DOES NOT HOLD",
            None => "not measured",
        };
        _ = writeln!(text, "{verdict:<13}  {}\n{:15}{}", claim.text, "", claim.figures);
    }
    text
}
