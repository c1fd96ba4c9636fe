//! What each benchmark needs and how long it takes, for users who choose one.

use std::fmt::Write as _;

use clap::ValueEnum;

use super::outcome::Bench;

/// The description of a benchmark, besides what it measures. That is in the help of [`Bench`].
struct Entry {
    needs: &'static str,
    /// The time of a full run after everything is built, without hardware virtualisation.
    duration: &'static str,
}

const MACHINE: &str = "a virtual machine (QEMU)";
const LOOP_DEVICES: &str =
    "a virtual machine (QEMU); root and loop devices of this machine are used if there are any";
const CLUSTER: &str = "a cluster with one node (QEMU, Go)";

fn entry(bench: Bench) -> Entry {
    let (needs, duration) = match bench {
        Bench::Loop => (LOOP_DEVICES, "some minutes"),
        Bench::Csi => (MACHINE, "some minutes"),
        Bench::Clone => ("a virtual machine (QEMU) and 8 GiB of disk space", "some minutes"),
        Bench::Rpc => (MACHINE, "some minutes"),
        Bench::Io => (MACHINE, "up to half an hour"),
        Bench::Scale => ("a control plane without nodes (Go)", "two hours"),
        Bench::Burst => ("a control plane without nodes (Go)", "some minutes"),
        Bench::Footprint => (CLUSTER, "some minutes"),
        Bench::Provision => (CLUSTER, "up to half an hour"),
        Bench::Growth => (CLUSTER, "up to half an hour"),
        Bench::Deletion => {
            ("a cluster with one node (QEMU, Go), and a control plane without nodes", "up to an hour")
        }
        Bench::Node => {
            ("a cluster for each of three kinds of nodes (QEMU, Go), one after the other", "some hours")
        }
    };
    Entry { needs, duration }
}

/// Returns the benchmarks in the order of a run of all, with three lines each.
pub(super) fn list() -> String {
    let mut text =
        "benchmarks (cargo harness bench [NAME]), in the order in which they run without a name:\n"
            .to_owned();
    for bench in Bench::value_variants() {
        let Entry { needs, duration } = entry(*bench);
        let measures = measures(*bench);
        _ = writeln!(
            text,
            "  {:<10} {measures}\n{:13}needs {needs}\n{:13}takes {duration}",
            bench.name(),
            "",
            ""
        );
    }
    text.push_str(
        "With --quick, each takes a fraction of that time. The times are those of a machine without hardware virtualisation.\n\
         In a run of all, footprint, provision, growth and deletion share one cluster.\n",
    );
    text
}

/// Returns the help of a benchmark, in one line.
fn measures(bench: Bench) -> String {
    let help = bench.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
    help.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_says_for_each_benchmark_what_it_measures_what_it_needs_and_how_long_it_takes() {
        let text = list();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + 3 * Bench::value_variants().len() + 2, "{text}");
        for (bench, lines) in Bench::value_variants().iter().zip(lines[1..].chunks(3)) {
            assert!(
                lines[0].starts_with(&format!("  {} ", bench.name())) && lines[0].len() > 30,
                "{lines:?}"
            );
            assert!(
                lines[1].trim().starts_with("needs ") && lines[2].trim().starts_with("takes "),
                "{lines:?}"
            );
        }
    }
}
