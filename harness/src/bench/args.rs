//! The arguments of a run.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use crate::node_options::kernel_name;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The benchmark to run. Without a name, all of them run, one after the other. One that fails does not stop the others.
    #[arg(value_name = "NAME")]
    pub(super) bench: Option<Bench>,
    /// A short run: fewer devices, ids, files, bytes and repetitions. Its thresholds are not those of a full run.
    #[arg(long)]
    pub(super) quick: bool,
    /// Fail if a threshold is not met.
    #[arg(long)]
    pub(super) check: bool,
    /// Compare with an earlier run, of which this is the report.json, and fail if a row is significantly worse. Several
    /// files are combined, for rows with few samples.
    #[arg(long, value_name = "FILE")]
    pub(super) compare: Vec<PathBuf>,
    /// With --compare: compare the run of this report.json, rather than measure. Several files are combined.
    #[arg(long, value_name = "FILE", requires = "compare", conflicts_with = "bench")]
    pub(super) results: Vec<PathBuf>,
    /// With --compare: a row is worse if its median is more than this many times as bad.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.1, value_parser = factor)]
    pub(super) factor: f64,
    /// The kernel of vm-images/kernels/kernels.toml for measurements in a virtual machine.
    #[arg(long, value_name = "NAME", value_parser = kernel_name)]
    pub(super) kernel: Option<String>,
    /// Only for node and scale: measure this part of the benchmark alone.
    #[arg(long, value_enum, value_name = "PART")]
    pub(super) part: Option<Part>,
    /// Only for node: the number of block volumes on each node, to which pods are added. The default is 500, and 20 with
    /// --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=5000))]
    pub(super) volumes: Option<u64>,
}

/// A part of a benchmark.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum Part {
    /// Of node: `losetup -j` of util-linux and of this project, without a cluster.
    Losetup,
    /// Of node: the start of pods with a block volume, on one cluster for each kind of node.
    Pods,
    /// Of node: the measuring of emptyDirs with many files by the kubelet, on one cluster for each kubelet.
    Stats,
    /// Of scale: the provisioner and its peer on one node, beside claims of another node.
    Claims,
    /// Of scale: the placement of one claim by the controller, beside many nodes.
    Placement,
    /// Of scale: the memory of a provisioner beside claims with large annotations.
    Annotations,
    /// Of scale: many provisioners beside one API server.
    Fleet,
}

/// A benchmark. The order is that of a run of all: first those without a cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum Bench {
    /// Attaching, finding, detaching and removing loop devices; allocating project ids.
    Loop,
    /// Cloning and snapshotting images, and cloning directory trees.
    Clone,
    /// The node's calls of the Container Storage Interface with ten volumes on the node and with a thousand.
    Rpc,
    /// Reads and writes of a Block volume on two kernels, compared with its file and with the device of losetup(8).
    Io,
    /// The provisioner of a node beside the claims of another node, compared with external-provisioner and external-resizer, and the
    /// controller beside many nodes: the bytes that they receive, their memory and their requests. Also 1,000 nodes beside one API server: the cost of a claim.
    Scale,
    /// Many concurrent claims on one node with volumes in memory, compared with external-provisioner without its rate limits.
    Burst,
    /// The memory, the sizes and the start of the driver on a real cluster, compared with the sidecars of Kubernetes.
    Footprint,
    /// Many concurrent claims on a real cluster, compared with external-provisioner.
    Provision,
    /// Expansion of claims in use on a real cluster: the time until the pod sees it, compared with the kubelet alone.
    Growth,
    /// Bulk deletion of volumes with many files on a real cluster, while others are provisioned; and of volumes in memory.
    Deletion,
    /// The tools and the kubelet of a node: `losetup -j` of util-linux and of this project, pods that start with a block
    /// volume, and emptyDirs with many files, by a stock kubelet and by a patched one.
    Node,
}

impl Args {
    /// Refuses options of another benchmark.
    ///
    /// # Errors
    /// The message names the option and the remedy.
    pub(super) fn check(&self) -> Result<()> {
        let of_part = self.part.map(|part| ("--part", part.bench()));
        let of_volumes = self.volumes.map(|_| ("--volumes", Bench::Node));
        for (option, owner) in of_part.into_iter().chain(of_volumes) {
            anyhow::ensure!(
                self.bench == Some(owner),
                "{option}: only the benchmark {} has it; name that benchmark, or leave {option} out",
                owner.name()
            );
        }
        Ok(())
    }

    /// Returns `true` if this part is measured.
    pub(super) fn runs(&self, part: Part) -> bool {
        self.part.is_none_or(|only| only == part)
    }

    /// Returns the benchmarks of the run, in its order.
    pub(super) fn benches(&self) -> Vec<Bench> {
        self.bench.map_or_else(|| Bench::value_variants().to_vec(), |only| vec![only])
    }

    /// Returns the size of a full run, or that of a short one.
    pub(super) fn size<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

impl Part {
    fn bench(self) -> Bench {
        match self {
            Part::Losetup | Part::Pods | Part::Stats => Bench::Node,
            Part::Claims | Part::Placement | Part::Annotations | Part::Fleet => Bench::Scale,
        }
    }
}

impl Bench {
    /// Returns the name on the command line and of the report.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Parses a factor above 1, as the value of an option.
fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse::<f64>().map_err(|error| format!("{error}"))?;
    if factor.is_finite() && factor > 1.0 { Ok(factor) } else { Err("must be a number above 1".to_owned()) }
}

#[cfg(test)]
pub(super) fn parse(line: &str) -> Result<Args> {
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: Args,
    }

    let args = CommandLine::try_parse_from(["bench"].into_iter().chain(line.split_whitespace()))?.args;
    args.check().map(|()| args)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Benchmarks without a cluster run first.
    #[test]
    fn all_benchmarks_run_by_default() {
        let all = parse("").unwrap().benches();
        assert_eq!(
            (all.len(), all[0], *all.last().unwrap()),
            (Bench::value_variants().len(), Bench::Loop, Bench::Node)
        );
        assert_eq!(parse("growth").unwrap().benches(), [Bench::Growth]);
    }

    #[test]
    fn option_needs_name_of_its_benchmark() {
        assert!(parse("node --part losetup --volumes 5").is_ok());
        assert!(parse("scale --part fleet").is_ok());
        for (line, owner) in [
            ("--part losetup", "node"),
            ("scale --part pods", "node"),
            ("loop --volumes 5", "node"),
            ("node --part claims", "scale"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(&format!("only the benchmark {owner}")), "{error}");
        }
    }

    #[test]
    fn comparison_needs_files_and_valid_factor() {
        let args = parse("loop --compare a.json --compare b.json").unwrap();
        assert_eq!((args.compare.len(), args.factor), (2, 1.1));
        assert_eq!(parse("--compare a.json --results c.json --factor 2").unwrap().factor, 2.0);
        for line in
            ["--results c.json", "loop --compare a.json --results c.json", "--factor 1", "--factor nan"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
