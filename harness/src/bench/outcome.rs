//! The arguments and the result of a benchmark.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;
use testvm::session::Session;

use super::measurement::{Environment, Measurements};
use super::plot::Plot;
use super::threshold::Threshold;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[arg(value_name = "NAME")]
    pub(super) bench: Bench,
    /// A short run: fewer devices, ids, files, bytes and repetitions. Its thresholds are not those of a full run.
    #[arg(long)]
    pub(super) quick: bool,
    /// Fail if a threshold is not met.
    #[arg(long)]
    pub(super) check: bool,
    /// The kernel of vm-images/kernels/kernels.toml for measurements in a virtual machine.
    #[arg(long, value_name = "NAME")]
    pub(super) kernel: Option<String>,
    /// The directory of the backing files, whose file system affects the measurements. The default is in
    /// cargo's target directory.
    #[arg(long, value_name = "DIR")]
    pub(super) dir: Option<PathBuf>,
    /// Only for node: measure this part alone.
    #[arg(long, value_enum, value_name = "PART")]
    pub(super) part: Option<NodePart>,
    /// Only for node: the number of block volumes on each node, to which pods are added. The default is 500, and 20 with
    /// --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=5000))]
    pub(super) volumes: Option<u64>,
}

/// A part of the benchmark node.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum NodePart {
    /// `losetup -j` of util-linux and of this project, without a cluster.
    Losetup,
    /// The start of pods with a block volume, on one cluster for each kind of node.
    Pods,
    /// The measuring of emptyDirs with many files by the kubelet, on one cluster for each kubelet.
    Stats,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum Bench {
    /// Attaching, finding, detaching and removing loop devices; allocating project ids.
    Loop,
    /// Statistics of volumes with few files and with many.
    Csi,
    /// Cloning and snapshotting images, and cloning directory trees.
    Clone,
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
        let of_node = [("--part", self.part.is_some()), ("--volumes", self.volumes.is_some())];
        for (option, is_given) in of_node {
            anyhow::ensure!(
                !is_given || self.bench == Bench::Node,
                "{option} with the benchmark {}: only the benchmark node has it; leave {option} out",
                self.bench.name()
            );
        }
        Ok(())
    }

    /// Returns the arguments of a measuring program: these, and `--quick` for a short run.
    pub(super) fn of_program(&self, args: &[&str]) -> Vec<String> {
        args.iter().copied().chain(self.quick.then_some("--quick")).map(str::to_owned).collect()
    }
}

impl Bench {
    /// Returns the name on the command line and of the report.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The result of a benchmark.
pub(super) struct Outcome {
    pub(super) measurements: Measurements,
    pub(super) thresholds: Vec<Threshold>,
    pub(super) plots: &'static [Plot],
}

impl Outcome {
    /// Compares the measurements of one or more machines with their thresholds.
    pub(super) fn new(
        parts: Vec<Environment>,
        thresholds: impl FnOnce(&Measurements) -> Vec<Threshold>,
        plots: &'static [Plot],
    ) -> Outcome {
        let measurements = Measurements { parts };
        Outcome { thresholds: thresholds(&measurements), measurements, plots }
    }
}

/// Creates and returns the directory of the benchmarks' files.
pub(super) fn directory(session: &Session) -> Result<PathBuf> {
    let directory = session.workspace.reports("bench");
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}
