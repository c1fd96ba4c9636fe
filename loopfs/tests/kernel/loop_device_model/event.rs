//! What happens in a round.

use super::calls::{Attachment, Call, Handle, Reply};

/// What keeps a device open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum User {
    Handle(Handle),
    /// A descriptor of another program.
    Descriptor(u64),
    Mount(u64),
}

/// What a worker or another program did.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Replied {
        worker: usize,
        call: Call,
        reply: Reply,
    },
    /// The worker was killed before it replied.
    Interrupted {
        worker: usize,
        call: Call,
    },
    /// The kernel closed the descriptors of a killed worker.
    Died {
        worker: usize,
    },
    /// Another program bound a file.
    Bound {
        file: usize,
        attachment: Attachment,
    },
    /// Another program detached its device.
    Unbound {
        index: u32,
    },
    /// Another program closed or unmounted a device.
    Left {
        user: User,
    },
}

impl Event {
    /// Returns `false` for the death of a worker that has calls among the events. These come first.
    pub(super) fn may_precede(&self, events: &[&Self]) -> bool {
        let Self::Died { worker: dead } = self else { return true };
        !events.iter().any(|event| match event {
            Self::Replied { worker, .. } | Self::Interrupted { worker, .. } => worker == dead,
            _ => false,
        })
    }
}
