//! Signals between the tasks of the process.

use tokio::sync::watch;

/// Something that happens once, and that any number of tasks wait for. (The caches' own `wait_until_ready`
/// wakes only the one that began to wait last, and that is the controller it belongs to.)
#[derive(Debug)]
pub(crate) struct Gate {
    open: watch::Sender<bool>,
}

impl Default for Gate {
    fn default() -> Self {
        Gate { open: watch::Sender::new(false) }
    }
}

impl Gate {
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.open.borrow()
    }

    pub(crate) async fn passed(&self) {
        // An error would mean that the sender is gone, and it is right here.
        drop(self.open.subscribe().wait_for(|open| *open).await);
    }
}

/// A generation number. It increases when failed operations may succeed on a retry, because space was freed or the store
/// became usable.
#[derive(Debug)]
pub(crate) struct Chances {
    counter: watch::Sender<u64>,
}

impl Default for Chances {
    fn default() -> Self {
        Chances { counter: watch::Sender::new(0) }
    }
}

impl Chances {
    pub(crate) fn current(&self) -> u64 {
        *self.counter.borrow()
    }

    pub(crate) fn improve(&self) {
        self.counter.send_modify(|counter| *counter += 1);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.counter.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::{task::JoinSet, time::timeout};

    use super::*;

    #[tokio::test]
    async fn a_gate_lets_everybody_pass() {
        let gate = Arc::new(Gate::default());
        let mut waiting = JoinSet::new();
        for _ in 0..8 {
            let gate = Arc::clone(&gate);
            waiting.spawn(async move { gate.passed().await });
        }
        tokio::task::yield_now().await;
        assert!(waiting.try_join_next().is_none());
        gate.open();
        timeout(Duration::from_secs(5), waiting.join_all()).await.expect("all of them");
    }
}
