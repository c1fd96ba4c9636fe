//! How both services work on volumes and snapshots: off the event loop, and one change of each at a time.

use std::sync::Arc;

use loopfs::VolumeId;

use crate::error::Result;
use crate::op_guard::{Guards, Object, Use};
use crate::rpc;
use crate::volumes::Volumes;

/// The volumes, and what is being done to which of them by whichever service.
#[derive(Clone, Debug)]
pub(crate) struct VolumeWork {
    guards: Guards,
    volumes: Arc<Volumes>,
}

impl VolumeWork {
    pub(crate) fn new(volumes: Volumes) -> Self {
        Self { guards: Guards::default(), volumes: Arc::new(volumes) }
    }

    /// Runs work that changes something about a volume, while nothing else does.
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        volume: &VolumeId,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.holding([(volume.clone().into(), Use::Change)], work).await
    }

    /// Runs work while nothing hinders it.
    pub(crate) async fn holding<T: Send + 'static>(
        &self,
        wanted: impl IntoIterator<Item = (Object, Use)>,
        work: impl FnOnce(&Volumes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let guard = self.guards.acquire(wanted)?;
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
