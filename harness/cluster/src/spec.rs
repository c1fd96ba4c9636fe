//! The specification of a cluster: its profile, and the directories of its files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cache;

use super::components::{ClusterProfile, Durability};
use super::layout::Layout;

/// The specification of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// The directory of its keys, its state and its disks. It is emptied first.
    pub dir: PathBuf,
    /// The directory of the logs of all components.
    pub logs: PathBuf,
    /// How durable the writes of the control plane's store are.
    pub durability: Durability,
    /// The use of the cluster.
    pub profile: ClusterProfile,
}

impl ClusterSpec {
    /// Empties the directories, and returns them as the layout of the components.
    pub(super) fn make_directories(&self) -> Result<Layout> {
        for dir in [&self.dir, &self.logs] {
            cache::empty_dir(dir)?;
        }
        Ok(Layout::new(&absolute(&self.dir)?, &absolute(&self.logs)?))
    }
}

fn absolute(dir: &Path) -> Result<PathBuf> {
    fs::canonicalize(dir).with_context(|| format!("find {}", dir.display()))
}
