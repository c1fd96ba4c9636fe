//! The data directory and the mounts of its volumes.

use std::path::{Path, PathBuf};

use csi::volume_mounts::{mount_points, require_project_quotas};
use loopfs::volume_store::VolumeId;

use super::evaluation::Evaluation;

/// Evaluates whether the data directory is a mount point with enforced project quotas.
pub(super) fn quota_enforced(data_dir: &Path) -> Evaluation {
    match require_project_quotas(data_dir) {
        Ok(()) => Evaluation::met(format!("{} enforces project quotas", data_dir.display())),
        Err(error) => Evaluation::not_met(format!("{error:#}")),
    }
}

/// A query about one volume.
#[derive(Clone, Debug)]
pub(super) struct PublishedQuery {
    pub(super) data_dir: PathBuf,
    pub(super) volume: VolumeId,
}

impl PublishedQuery {
    pub(super) fn published(&self) -> anyhow::Result<Evaluation> {
        let Self { data_dir, volume } = self;
        Ok(match mount_points(data_dir, volume)?.as_deref() {
            None => Evaluation::not_met(format!("there is no volume {volume} in {}", data_dir.display())),
            Some([]) => Evaluation::not_met(format!("volume {volume} is mounted nowhere")),
            Some(points) => {
                let points: Vec<String> = points.iter().map(|point| point.display().to_string()).collect();
                Evaluation::met(format!("volume {volume} is mounted at {}", points.join(", ")))
            }
        })
    }
}
