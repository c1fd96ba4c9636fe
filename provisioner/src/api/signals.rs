//! Signals between the tasks of the process.

use tokio::sync::watch;

/// A signal that is set once and that any number of tasks can wait for: a cache has received its first list. (The caches' own
/// `wait_until_ready` wakes only the task that began to wait last, and that is the controller of the cache.)
#[derive(Debug)]
pub(crate) struct SyncSignal {
    is_set: watch::Sender<bool>,
}

impl Default for SyncSignal {
    fn default() -> Self {
        SyncSignal { is_set: watch::Sender::new(false) }
    }
}

impl SyncSignal {
    /// Sets the signal and wakes all waiting tasks.
    pub(crate) fn set(&self) {
        self.is_set.send_replace(true);
    }

    pub(crate) fn is_set(&self) -> bool {
        *self.is_set.borrow()
    }

    /// Returns once the signal is set.
    pub(crate) async fn wait(&self) {
        // An error would mean that the sender was dropped, but `self` holds it.
        drop(self.is_set.subscribe().wait_for(|is_set| *is_set).await);
    }
}

/// A generation number. It increases when failed operations may succeed on a retry, because space was freed or the store
/// became usable.
#[derive(Debug)]
pub(crate) struct RetryGeneration {
    generation: watch::Sender<u64>,
}

impl Default for RetryGeneration {
    fn default() -> Self {
        RetryGeneration { generation: watch::Sender::new(0) }
    }
}

impl RetryGeneration {
    pub(crate) fn current(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Increases the generation, so that failed operations are retried.
    pub(crate) fn bump(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::{task::JoinSet, time::timeout};

    use super::*;

    #[tokio::test]
    async fn a_signal_wakes_all_waiting_tasks() {
        let signal = Arc::new(SyncSignal::default());
        let mut waiting = JoinSet::new();
        for _ in 0..8 {
            let signal = Arc::clone(&signal);
            waiting.spawn(async move { signal.wait().await });
        }
        tokio::task::yield_now().await;
        assert!(waiting.try_join_next().is_none());
        signal.set();
        timeout(Duration::from_secs(60), waiting.join_all()).await.expect("all tasks are woken");
    }
}
