//! The node's storage for the other tasks: the driver, and the state that it reported last.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use service::Gauges;
use tokio::sync::watch;

use crate::store::driver::{Driver, StorageError, StorageState};

/// The storage, which all tasks of the process share.
pub(crate) struct Storage {
    driver: Arc<dyn Driver>,
    state: watch::Sender<StorageState>,
}

impl Storage {
    /// Returns storage whose state is unknown.
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Self {
        Storage { driver, state: watch::Sender::new(StorageState::Untried) }
    }

    /// Returns the driver, if the storage was open when the driver last reported its state.
    ///
    /// # Errors
    /// [`StorageError::Untried`] or [`StorageError::Unavailable`] if it was not.
    pub(crate) fn driver(&self) -> Result<&dyn Driver, StorageError> {
        self.filesystem_uuid().map(|_| &*self.driver)
    }

    /// Returns the driver, for calls that do not need the storage.
    pub(crate) fn driver_in_any_state(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Returns the UUID of the file system of the volumes, in its usual text form.
    pub(crate) fn filesystem_uuid(&self) -> Result<String, StorageError> {
        match &*self.state.borrow() {
            StorageState::Open { filesystem_uuid } => Ok(filesystem_uuid.clone()),
            StorageState::Unavailable(why) | StorageState::Absent(why) => {
                Err(StorageError::Unavailable(format!("this node's storage is unavailable: {why}")))
            }
            StorageState::Untried => Err(StorageError::Untried),
        }
    }

    /// Registers whether the storage is open.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "1 if the driver reports that the data file system can be used, else 0; an event on the Node has the reason";
        registry.count("storage_open", help, u64::from(self.driver().is_ok()));
    }

    /// Sets the state. Returns `false` if it was the same before.
    pub(crate) fn set(&self, state: StorageState) -> bool {
        self.state.send_if_modified(|current| {
            let is_another = *current != state;
            *current = state;
            is_another
        })
    }

    /// Returns `true` if this node never had storage.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(*self.state.borrow(), StorageState::Absent(_))
    }

    /// Returns once the state is known.
    pub(crate) async fn tried(&self) {
        // An error would mean that the sender was dropped, but `self` holds it.
        drop(self.changes().wait_for(|state| *state != StorageState::Untried).await);
    }

    /// Returns a receiver that is notified of each change of the state.
    pub(crate) fn changes(&self) -> watch::Receiver<StorageState> {
        self.state.subscribe()
    }
}
