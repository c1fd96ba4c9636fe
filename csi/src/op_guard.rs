//! One operation at a time on a volume. "The CO MAY issue multiple calls for the same volume", says the specification,
//! and lets a driver answer the later one with ABORTED.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use loopfs::VolumeId;

use crate::error::{Error, Result};

/// The volumes that an operation is running on.
#[derive(Clone, Debug, Default)]
pub(crate) struct VolumeGuards {
    busy: Arc<Mutex<HashSet<VolumeId>>>,
}

/// Keeps a volume to its holder until dropped. It goes with the work, not with the call: a client that hangs up does
/// not stop work that is under way.
#[derive(Debug)]
#[must_use = "the volume is free again once this is dropped"]
pub(crate) struct VolumeGuard {
    guards: VolumeGuards,
    volume: VolumeId,
}

impl VolumeGuards {
    pub(crate) fn acquire(&self, volume: &VolumeId) -> Result<VolumeGuard> {
        if self.busy().insert(volume.clone()) {
            Ok(VolumeGuard { guards: self.clone(), volume: volume.clone() })
        } else {
            Err(Error::InProgress(volume.clone()))
        }
    }

    /// The set is right after every single step, so a panic elsewhere has not spoilt it.
    fn busy(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VolumeGuard {
    fn drop(&mut self) {
        self.guards.busy().remove(&self.volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_held_by_one_and_others_are_not_hindered() {
        let guards = VolumeGuards::default();
        let (first, second) = (VolumeId::parse("a").unwrap(), VolumeId::parse("b").unwrap());
        let held = guards.acquire(&first).unwrap();
        assert!(matches!(guards.acquire(&first), Err(Error::InProgress(volume)) if volume == first));
        let other = guards.acquire(&second).unwrap();
        drop(held);
        drop(guards.acquire(&first).unwrap());
        drop(other);
    }

    #[test]
    fn a_panic_frees_the_volume() {
        let guards = VolumeGuards::default();
        let volume = VolumeId::parse("a").unwrap();
        let held = guards.acquire(&volume).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = held;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert!(guards.acquire(&volume).is_ok());
    }
}
