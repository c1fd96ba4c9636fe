//! The result of a cleanup.

use crate::loop_device::Detach;

/// The result of a cleanup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a deferred detach has to be repeated"]
pub enum Cleanup {
    /// The volume has no device any more, or is published at another target.
    Complete,
    /// A process has a device open. The kernel detaches it at its last close, unless that process cancels it
    /// (`LOOP_SET_STATUS64`). If the volume is not to be used again, call [`Publisher::detach`](super::Publisher::detach) until it is
    /// complete.
    DetachDeferred,
}

impl From<Detach> for Cleanup {
    fn from(detach: Detach) -> Self {
        match detach {
            Detach::Detached => Self::Complete,
            Detach::Deferred(_) => Self::DetachDeferred,
        }
    }
}

impl Cleanup {
    /// Returns the result of this cleanup and another one.
    pub(super) fn and(self, other: Self) -> Self {
        if self == Self::Complete { other } else { self }
    }
}
