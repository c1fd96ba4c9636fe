//! What is found out for each scrape: nothing that looks into a volume.

use std::sync::Arc;

use loopfs::{Census, DeviceCensus, Space};

use crate::audit::Findings;
use crate::error::Result;
use crate::storage::StorageGate;

/// The node at one moment.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// None while it cannot be used.
    pub(crate) storage: Option<Storage>,
    pub(crate) audit: Option<Arc<Findings>>,
}

#[derive(Debug)]
pub(crate) struct Storage {
    pub(super) space: Space,
    pub(super) census: Census,
    pub(super) devices: DeviceCensus,
    pub(super) idle: usize,
}

impl Snapshot {
    /// Lists two directories and sysfs: about 10 µs for each attached device, and 1 µs for each volume. Blocks.
    pub(crate) fn take(gate: &StorageGate, audit: Option<Arc<Findings>>) -> Self {
        match Storage::read(gate) {
            Ok(storage) => Self { storage: Some(storage), audit },
            Err(error) => {
                tracing::debug!(%error, "there is nothing to tell of the storage");
                Self { storage: None, audit: None }
            }
        }
    }
}

impl Storage {
    fn read(gate: &StorageGate) -> Result<Self> {
        let storage = gate.verified()?;
        Ok(Self {
            space: storage.store.space()?,
            census: storage.store.census()?,
            devices: storage.loops.census()?,
            idle: storage.loops.idle(),
        })
    }
}
