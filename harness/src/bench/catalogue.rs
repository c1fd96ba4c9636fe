//! What each benchmark measures and requires, what it needs and how long it takes.

use anyhow::Result;
use clap::ValueEnum;
use testvm::session::Session;

use super::args::{Args, Bench};
use super::cluster::SharedCluster;
use super::measurement::Environment;
use super::plot::Plot;
use super::threshold::Requirement;
use super::{burst, deletion, footprint, growth, node, programs, provision, scale};
use crate::listing::{self, Line};

/// The description of a benchmark, besides what it measures. That is in the help of [`Bench`].
pub(super) struct Entry {
    needs: &'static str,
    /// The time of a full run after everything is built, without hardware virtualisation.
    duration: &'static str,
    pub(super) requirements: fn(&Args) -> Vec<Requirement>,
    pub(super) plots: fn() -> Vec<Plot>,
}

const MACHINE: &str = "a virtual machine (QEMU)";
const LOOP_DEVICES: &str =
    "a virtual machine (QEMU); root and loop devices of this machine are used if there are any";
const CLUSTER: &str = "a cluster with one node (QEMU, Go)";
const CONTROL_PLANE: &str = "a control plane without nodes (Go)";
const MINUTES: &str = "some minutes";
const HALF_AN_HOUR: &str = "up to half an hour";

impl Bench {
    pub(super) fn entry(self) -> Entry {
        let (needs, duration, requirements, plots): (_, _, fn(&Args) -> _, fn() -> _) = match self {
            Bench::Loop => (LOOP_DEVICES, MINUTES, programs::loop_requirements, programs::loop_plots),
            Bench::Clone => (
                "a virtual machine (QEMU) and 8 GiB of disk space",
                MINUTES,
                programs::clone_requirements,
                programs::clone_plots,
            ),
            Bench::Rpc => (MACHINE, MINUTES, programs::rpc_requirements, programs::rpc_plots),
            Bench::Io => (MACHINE, HALF_AN_HOUR, programs::io_requirements, programs::io_plots),
            Bench::Scale => (CONTROL_PLANE, "two hours", scale::requirements, scale::plots),
            Bench::Burst => (CONTROL_PLANE, MINUTES, burst::requirements, Vec::new),
            Bench::Footprint => (CLUSTER, MINUTES, footprint::requirements, Vec::new),
            Bench::Provision => (CLUSTER, HALF_AN_HOUR, provision::requirements, Vec::new),
            Bench::Growth => (CLUSTER, HALF_AN_HOUR, growth::requirements, Vec::new),
            Bench::Deletion => (
                "a cluster with one node (QEMU, Go), and a control plane without nodes",
                "up to an hour",
                deletion::requirements,
                Vec::new,
            ),
            Bench::Node => (
                "a cluster for each of three kinds of nodes (QEMU, Go), one after the other",
                "some hours",
                node::requirements,
                programs::losetup_plots,
            ),
        };
        Entry { needs, duration, requirements, plots }
    }

    pub(super) async fn run(
        self,
        session: &Session,
        args: &Args,
        shared: &mut SharedCluster,
    ) -> Result<Vec<Environment>> {
        Ok(match self {
            Bench::Loop => programs::loop_devices(session, args).await?,
            Bench::Clone => programs::clones(session, args).await?,
            Bench::Rpc => programs::rpc(session, args).await?,
            Bench::Io => programs::io(session, args).await?,
            Bench::Scale => scale::run(session, args).await?,
            Bench::Burst => vec![burst::run(session, args).await?],
            Bench::Footprint => vec![footprint::run(session, args, shared).await?],
            Bench::Provision => vec![provision::run(session, args, shared).await?],
            Bench::Growth => vec![growth::run(session, args, shared).await?],
            Bench::Deletion => deletion::run(session, args, shared).await?,
            Bench::Node => node::run(session, args).await?,
        })
    }
}

const HEADING: &str = "benchmarks (cargo harness bench [NAME]), in the order of a run of all; --quick takes a fraction of the time:";

/// Returns the benchmarks with one line each.
pub(crate) fn list(session: &Session) -> String {
    listing::section(session, HEADING, lines())
}

fn lines() -> impl Iterator<Item = Line> {
    Bench::value_variants().iter().map(|bench| {
        let Entry { needs, duration, .. } = bench.entry();
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
    use rstest::rstest;

    use super::super::args::parse;
    use super::*;

    #[test]
    fn the_list_describes_each_benchmark() {
        let lines: Vec<Line> = lines().collect();
        assert_eq!(lines.len(), Bench::value_variants().len());
        for line in lines {
            assert!(line.about.len() > 30 && !line.needs.is_empty() && !line.estimate.is_empty(), "{line:?}");
        }
    }

    #[test]
    fn thresholds_are_met_at_their_bounds() {
        for bench in Bench::value_variants() {
            for requirement in (bench.entry().requirements)(&parse("").unwrap()) {
                for (excess, expected) in [(1.0, true), (1.01, false)] {
                    let thresholds = requirement.judge("", &requirement.example(excess));
                    assert_eq!(thresholds.len(), 1, "{requirement:?}");
                    assert_eq!(thresholds[0].is_met, Some(expected), "{bench:?}: {thresholds:?}");
                }
            }
        }
    }

    #[rstest]
    #[case("node", 7)]
    #[case("node --part losetup", 2)]
    #[case("node --part pods", 4)]
    #[case("node --part stats", 1)]
    #[case("scale", 13)]
    #[case("scale --part claims", 4)]
    #[case("scale --part placement", 6)]
    #[case("scale --part annotations", 2)]
    #[case("scale --part fleet", 1)]
    #[case("io", 8)]
    #[case("io --kernel trixie", 4)]
    #[case("rpc", 8)]
    fn part_has_only_its_thresholds(#[case] line: &str, #[case] expected: usize) {
        let args = parse(line).unwrap();
        assert_eq!((args.bench.unwrap().entry().requirements)(&args).len(), expected);
    }
}
