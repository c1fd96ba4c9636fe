//! What one cluster is made for, and where it keeps its files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::components::{ClusterProfile, Durability};
use super::layout::Layout;
use crate::cache;

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Holds its keys, its state and its disks; emptied first.
    pub dir: PathBuf,
    /// Holds the log of every component.
    pub logs: PathBuf,
    /// How the control plane's store treats its disk.
    pub durability: Durability,
    pub profile: ClusterProfile,
}

impl ClusterSpec {
    /// Empties the directories, and returns them as the layout that the components are given.
    pub(super) fn make_directories(&self) -> Result<Layout> {
        for dir in [&self.dir, &self.logs] {
            empty(dir)?;
        }
        Ok(Layout::new(&absolute(&self.dir)?, &absolute(&self.logs)?))
    }
}

/// Makes a directory of ours, without what a run before left in it.
fn empty(dir: &Path) -> Result<()> {
    cache::remove_dir(dir)?;
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))
}

fn absolute(dir: &Path) -> Result<PathBuf> {
    fs::canonicalize(dir).with_context(|| format!("find {}", dir.display()))
}
