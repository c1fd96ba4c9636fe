//! What each benchmark measures and requires, what it needs and how long it takes.

use anyhow::Result;
use clap::ValueEnum;
use testvm::session::Session;

use super::args::{Args, Bench};
use super::measurement::Environment;
use super::threshold::Requirement;
use super::{burst, deletion, footprint, growth, node, programs, provision, scale};
use crate::listing::{self, Line};

const MACHINE: &str = "a virtual machine (QEMU)";
const CLUSTER: &str = "a cluster with one node (QEMU, Go)";
const CONTROL_PLANE: &str = "a control plane without nodes (Go)";
const MINUTES: &str = "some minutes";
const HALF_AN_HOUR: &str = "up to half an hour";

impl Bench {
    /// Returns what it needs, and the time of a full run after everything is built, without hardware virtualisation.
    fn needs_and_time(self) -> (&'static str, &'static str) {
        match self {
            Bench::Loop => (
                "a virtual machine (QEMU); root and loop devices of this machine are used if there are any",
                MINUTES,
            ),
            Bench::Clone => ("a virtual machine (QEMU) and 8 GiB of disk space", MINUTES),
            Bench::Rpc => (MACHINE, MINUTES),
            Bench::Io => (MACHINE, HALF_AN_HOUR),
            Bench::Scale => (CONTROL_PLANE, "two hours"),
            Bench::Burst => (CONTROL_PLANE, MINUTES),
            Bench::Footprint => (CLUSTER, MINUTES),
            Bench::Provision | Bench::Growth => (CLUSTER, HALF_AN_HOUR),
            Bench::Deletion => {
                ("a cluster with one node (QEMU, Go), and a control plane without nodes", "up to an hour")
            }
            Bench::Node => {
                ("a cluster for each of three kinds of nodes (QEMU, Go), one after the other", "some hours")
            }
        }
    }

    pub(super) fn requirements(self, args: &Args) -> Vec<Requirement> {
        match self {
            Bench::Loop => programs::loop_requirements(),
            Bench::Clone => programs::clone_requirements(),
            Bench::Rpc => programs::rpc_requirements(),
            Bench::Io => programs::io_requirements(args),
            Bench::Scale => scale::requirements(args),
            Bench::Burst => burst::requirements(),
            Bench::Footprint => footprint::requirements(),
            Bench::Provision => provision::requirements(),
            Bench::Growth => growth::requirements(),
            Bench::Deletion => deletion::requirements(),
            Bench::Node => node::requirements(args),
        }
    }

    pub(super) async fn run(self, session: &Session, args: &Args) -> Result<Vec<Environment>> {
        match self {
            // The first five stop in order if the run is cancelled, because they may have devices on this machine.
            Bench::Loop => programs::loop_devices(session, args).await,
            Bench::Clone => programs::clones(session, args).await,
            Bench::Rpc => programs::rpc(session, args).await,
            Bench::Io => programs::io(session, args).await,
            Bench::Node => node::run(session, args).await,
            Bench::Scale => session.until_cancelled(scale::run(session, args)).await,
            Bench::Burst => Ok(vec![session.until_cancelled(burst::run(session, args)).await?]),
            Bench::Footprint => Ok(vec![session.until_cancelled(footprint::run(session, args)).await?]),
            Bench::Provision => Ok(vec![session.until_cancelled(provision::run(session, args)).await?]),
            Bench::Growth => Ok(vec![session.until_cancelled(growth::run(session, args)).await?]),
            Bench::Deletion => session.until_cancelled(deletion::run(session, args)).await,
        }
    }
}

const HEADING: &str = "benchmarks (cargo harness bench [NAME]), in the order of a run of all; --quick takes a fraction of the time:";

/// Returns the benchmarks with one line each.
pub(crate) fn list(session: &Session) -> String {
    listing::section(session, HEADING, lines())
}

fn lines() -> impl Iterator<Item = Line> {
    Bench::value_variants().iter().map(|bench| {
        let (needs, estimate) = bench.needs_and_time();
        let help = bench.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
        let help = help.unwrap_or_default();
        let about = help.split(". ").next().unwrap_or_default().trim_end_matches('.').to_owned();
        Line { kind: "bench", name: bench.name(), about, needs, estimate }
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::args::parse;
    use super::*;

    #[test]
    fn the_list_describes_each_benchmark() {
        for line in lines() {
            assert!(line.about.len() > 30 && !line.about.contains(". "), "{line:?}");
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
        assert_eq!(args.bench.unwrap().requirements(&args).len(), expected);
    }
}
