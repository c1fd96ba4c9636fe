//! How both services work on volumes: off the event loop, and one change of a volume at a time.

use std::sync::Arc;

use loopfs::VolumeId;

use crate::error::Result;
use crate::op_guard::VolumeGuards;
use crate::rpc;
use crate::volumes::Volumes;

/// The volumes, and which of them are being changed by whichever service.
#[derive(Clone, Debug)]
pub(crate) struct VolumeWork {
    guards: VolumeGuards,
    volumes: Arc<Volumes>,
}

impl VolumeWork {
    pub(crate) fn new(volumes: Volumes) -> Self {
        Self { guards: VolumeGuards::default(), volumes: Arc::new(volumes) }
    }

    /// Runs work that changes something about a volume, while nothing else does.
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        volume: &VolumeId,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let guard = self.guards.acquire(volume)?;
        self.query(move |volumes| {
            let _guard = guard;
            work(volumes)
        })
        .await
    }

    /// Runs work that changes nothing.
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let volumes = Arc::clone(&self.volumes);
        rpc::blocking(move || work(&volumes)).await
    }
}
