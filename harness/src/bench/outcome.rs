//! What a benchmark is asked, and what it found.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::measurement::Measurements;
use super::plot::Plot;
use super::threshold::Threshold;
use crate::session::Session;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[arg(value_name = "NAME")]
    pub(super) bench: Bench,
    /// A short run: fewer devices, ids, files, bytes and repetitions. What it claims is not what is claimed of a full run.
    #[arg(long)]
    pub(super) quick: bool,
    /// Fail if a claim does not hold.
    #[arg(long)]
    pub(super) check: bool,
    /// The kernel of vm-images/kernels/kernels.toml for what is measured in a virtual machine.
    #[arg(long, value_name = "NAME")]
    pub(super) kernel: Option<String>,
    /// Where to make the backing files; their file system is measured with them. The default is in cargo's target
    /// directory.
    #[arg(long, value_name = "DIR")]
    pub(super) dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum Bench {
    /// Attaching, finding, detaching and removing loop devices; allocating project ids.
    Loop,
    /// Statistics of volumes with few files and with many.
    Csi,
    /// Cloning and snapshotting images, and cloning directory trees.
    Clone,
    /// Many claims at once on a real cluster, beside external-provisioner.
    Provision,
    /// Claims that grow in use on a real cluster: when the pod sees it, and what the kubelet alone would take.
    Growth,
    /// Claims of volumes with many files deleted at once on a real cluster, while others are made; and of volumes in memory.
    Deletion,
}

/// What a benchmark found.
pub(super) struct Outcome {
    pub(super) name: &'static str,
    pub(super) measurements: Measurements,
    pub(super) thresholds: Vec<Threshold>,
    pub(super) plots: Vec<Plot>,
}

/// Where benchmarks leave their files.
pub(super) fn directory(session: &Session) -> Result<PathBuf> {
    let directory = session.workspace.reports("bench");
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}
