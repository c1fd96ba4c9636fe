//! Use, capacity and condition of published volumes.

use loopfs::volume_store::{VolumeId, VolumeStats};

use super::publish::Volumes;
use super::unavailable;
use crate::error::{Error, Result};
use crate::request::{GetStats, TargetPath};

impl Volumes {
    /// Returns the use, capacity and condition of a volume that is published at the path of the request.
    ///
    /// This works while the storage is unavailable as well, because the condition tells the kubelet about that.
    pub(crate) fn stats(&self, request: &GetStats) -> Result<VolumeStats> {
        let target = match &request.path {
            Some(path) => self.root.locate(path.relative())?,
            None => None,
        };
        let stats = match self.monitor.verified() {
            Ok(publisher) => publisher.stats_at(&request.volume, target.as_ref())?,
            Err(Error::StorageUnavailable(reason)) => match &target {
                Some(target) => unavailable::stats(&request.volume, target, self.monitor.devices(), reason)?,
                None => None,
            },
            Err(error) => return Err(error),
        };
        stats.ok_or_else(|| not_published(&request.volume, request.path.as_ref()))
    }
}

/// Returns the error that a volume is not at the path of a request, which is `None` if it is not below the kubelet directory.
pub(super) fn not_published(volume: &VolumeId, path: Option<&TargetPath>) -> Error {
    let path = path.map_or_else(
        || "the requested path, which is not below the kubelet directory".to_owned(),
        TargetPath::to_string,
    );
    Error::NotPublished(format!("volume {volume} is not published at {path}"))
}
