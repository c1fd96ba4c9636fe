//! Slots for slow work, which namespaces share.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

type Namespace = Option<String>;

/// Slots of which a namespace gets another one only while more are free than it uses: of eight, the first namespace gets four, the next
/// one two, and two more one each. Work that takes long therefore leaves slots to other namespaces, also if they were idle when it
/// began.
#[derive(Debug)]
pub(crate) struct FairSlots {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    used: HashMap<Namespace, usize>,
    /// In the order of their arrival.
    waiting: VecDeque<(Namespace, oneshot::Sender<Slot>)>,
    closed: bool,
}

/// A slot, used until this is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Arc<FairSlots>,
    namespace: Namespace,
}

impl FairSlots {
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let state = State { free: count, used: HashMap::new(), waiting: VecDeque::new(), closed: false };
        Arc::new(FairSlots { state: Mutex::new(state) })
    }

    /// Waits for a slot. Returns `None` once no more slots are given.
    pub(crate) async fn acquire(self: &Arc<Self>, namespace: Namespace) -> Option<Slot> {
        let turn = {
            let mut state = self.lock();
            if state.closed {
                return None;
            }
            let (sender, turn) = oneshot::channel();
            state.waiting.push_back((namespace, sender));
            turn
        };
        self.serve();
        turn.await.ok()
    }

    /// Gives no more slots. The used ones stay valid.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
    }

    /// Gives the free slots to those who wait.
    fn serve(self: &Arc<Self>) {
        while let Some((namespace, sender)) = self.lock().next() {
            // A receiver that ended returns the slot.
            drop(sender.send(Slot { slots: Arc::clone(self), namespace }));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state whole, so a panicked holder does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn used_by(&self, namespace: &Namespace) -> usize {
        self.used.get(namespace).copied().unwrap_or_default()
    }

    /// Removes the first waiter that may get a slot now, and counts the slot as used.
    fn next(&mut self) -> Option<(Namespace, oneshot::Sender<Slot>)> {
        self.waiting.retain(|(_, sender)| !sender.is_closed());
        let first = self.waiting.iter().position(|(namespace, _)| self.used_by(namespace) < self.free)?;
        let (namespace, sender) = self.waiting.remove(first)?;
        self.free -= 1;
        *self.used.entry(namespace.clone()).or_default() += 1;
        Some((namespace, sender))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.slots.lock();
        state.free += 1;
        match state.used.get_mut(&self.namespace) {
            Some(used) if *used > 1 => *used -= 1,
            _ => drop(state.used.remove(&self.namespace)),
        }
        drop(state);
        self.slots.serve();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn named(namespace: &str) -> Namespace {
        Some(namespace.to_owned())
    }

    /// Requests as many slots for the namespace. Returns those that it gets at once.
    fn acquired(slots: &Arc<FairSlots>, namespace: &str, count: usize) -> Vec<Slot> {
        let request = |_| slots.acquire(named(namespace)).now_or_never().flatten();
        (0..count).filter_map(request).collect()
    }

    #[test]
    fn no_namespace_takes_all_slots() {
        let slots = FairSlots::new(8);
        let of = |namespace| acquired(&slots, namespace, 10);
        let taken = [of("a"), of("b"), of("c"), of("d"), of("e")];
        assert_eq!(taken.each_ref().map(Vec::len), [4, 2, 1, 1, 0]);
        drop(taken);
        assert_eq!(of("e").len(), 4);
        assert_eq!(slots.lock().free, 8);
    }

    #[tokio::test]
    async fn a_free_slot_goes_to_another_namespace() {
        let slots = FairSlots::new(2);
        let first = slots.acquire(named("a")).await.unwrap();
        let second = slots.acquire(named("b")).await.unwrap();
        let order = Mutex::new(Vec::new());
        let wait = async |namespace: &'static str| {
            let slot = slots.acquire(named(namespace)).await.unwrap();
            order.lock().unwrap().push(namespace);
            drop(slot);
        };
        // The slot of `a` goes first to `b` if that uses none.
        tokio::join!(wait("a"), wait("a"), wait("b"), async {
            drop(second);
            tokio::task::yield_now().await;
            drop(first);
        });
        assert_eq!(*order.lock().unwrap(), ["b", "a", "a"]);
    }

    #[tokio::test]
    async fn closed_slots_end_all_waits() {
        let slots = FairSlots::new(2);
        let used = slots.acquire(named("a")).await.unwrap();
        let (waited, ()) = tokio::join!(slots.acquire(named("a")), async { slots.close() });
        assert!(waited.is_none() && slots.acquire(named("b")).await.is_none());
        drop(used);
    }
}
