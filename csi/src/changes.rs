//! What changes on this node, for those who watch it.

use tokio::sync::watch;

/// How often each has changed since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeCounts {
    /// The free space, by a volume or snapshot.
    pub(crate) space: u64,
    /// Space or a project id became free.
    pub(crate) freed: u64,
    /// The result of the search for foreign files.
    pub(crate) foreign_files: u64,
}

/// Counts changes, and notifies those who watch.
#[derive(Debug, Default)]
pub(crate) struct Changes(watch::Sender<ChangeCounts>);

impl Changes {
    pub(crate) fn space(&self) {
        self.0.send_modify(|counts| counts.space += 1);
    }

    pub(crate) fn freed(&self) {
        self.0.send_modify(|counts| {
            counts.space += 1;
            counts.freed += 1;
        });
    }

    pub(crate) fn foreign_files(&self) {
        self.0.send_modify(|counts| counts.foreign_files += 1);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<ChangeCounts> {
        self.0.subscribe()
    }
}
