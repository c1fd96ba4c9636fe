//! What each benchmark needs and how long it takes, for users who choose one.

use clap::ValueEnum;
use testvm::session::Session;

use super::outcome::Bench;
use crate::listing::{self, Line};

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

const HEADING: &str = "benchmarks (cargo harness bench [NAME]), in the order of a run of all; --quick takes a fraction of the time:";

/// Returns the benchmarks with one line each.
pub(crate) fn list(session: &Session) -> String {
    listing::section(session, HEADING, lines())
}

fn lines() -> impl Iterator<Item = Line> {
    Bench::value_variants().iter().map(|bench| {
        let Entry { needs, duration } = entry(*bench);
        Line { kind: "bench", name: bench.name(), about: measures(*bench), needs, estimate: duration }
    })
}

/// Returns the first sentence of the help of a benchmark.
fn measures(bench: Bench) -> String {
    let help = bench.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
    let help = help.unwrap_or_default();
    help.split(". ").next().unwrap_or_default().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_describes_each_benchmark() {
        let lines: Vec<Line> = lines().collect();
        assert_eq!(lines.len(), Bench::value_variants().len());
        for line in lines {
            assert!(line.about.len() > 30 && !line.needs.is_empty() && !line.estimate.is_empty(), "{line:?}");
        }
    }
}
