//! A queue of slow work, whose slots namespaces share. A semaphore of tokio or a limit of tower serves all callers in the order of their
//! arrival.

use std::collections::{HashMap, HashSet, VecDeque};

use kube::Resource;
use kube::runtime::reflector::ObjectRef;

type Namespace = Option<String>;

/// A queue with slots, of which a namespace gets another one only while more are free than it uses: of eight, the first namespace gets
/// four, the next one two, and two more one each. Work that takes long therefore leaves slots to other namespaces, also if they
/// were idle when it began. Among those that may have a slot, the namespace with the fewest gets it, and then the one that has had none
/// for the longest time.
#[derive(Debug)]
pub(crate) struct FairQueue<K: Resource<DynamicType = ()>> {
    free: usize,
    namespaces: HashMap<Namespace, Share<K>>,
    waiting: HashSet<ObjectRef<K>>,
    /// The objects that have a slot, and whether they were named again since.
    running: HashMap<ObjectRef<K>, bool>,
    /// Counts arrivals, and slots that were given and returned.
    turns: u64,
}

/// What a namespace has of the queue.
#[derive(Debug)]
struct Share<K: Resource<DynamicType = ()>> {
    used: usize,
    /// When it last got or returned a slot, or arrived.
    turn: u64,
    waiting: VecDeque<ObjectRef<K>>,
}

impl<K: Resource<DynamicType = ()>> FairQueue<K> {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            free: slots,
            namespaces: HashMap::new(),
            waiting: HashSet::new(),
            running: HashMap::new(),
            turns: 0,
        }
    }

    /// Returns the number of objects that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds an object, unless it waits already. One that has a slot is added when it returns it.
    pub(crate) fn push(&mut self, object: ObjectRef<K>) {
        if let Some(again) = self.running.get_mut(&object) {
            *again = true;
        } else if self.waiting.insert(object.clone()) {
            self.turns += 1;
            let new = || Share { used: 0, turn: self.turns, waiting: VecDeque::new() };
            let share = self.namespaces.entry(object.namespace.clone()).or_insert_with(new);
            share.waiting.push_back(object);
        }
    }

    /// Removes the next object, and gives it a slot until [`end`](Self::end).
    pub(crate) fn next(&mut self) -> Option<ObjectRef<K>> {
        let may_have_one =
            self.namespaces.values_mut().filter(|share| !share.waiting.is_empty() && share.used < self.free);
        let share = may_have_one.min_by_key(|share| (share.used, share.turn))?;
        let object = share.waiting.pop_front()?;
        self.turns += 1;
        (share.used, share.turn) = (share.used + 1, self.turns);
        self.free -= 1;
        self.waiting.remove(&object);
        self.running.insert(object.clone(), false);
        Some(object)
    }

    /// Takes the slot of an object back.
    pub(crate) fn end(&mut self, object: &ObjectRef<K>) {
        let Some(again) = self.running.remove(object) else { return };
        self.free += 1;
        self.turns += 1;
        if let Some(share) = self.namespaces.get_mut(&object.namespace) {
            (share.used, share.turn) = (share.used - 1, self.turns);
        }
        if again {
            self.push(object.clone());
        }
        self.forget_idle();
    }

    /// Removes the waiting objects for which `keep` returns `false`.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&ObjectRef<K>) -> bool) {
        self.waiting.retain(|object| keep(object));
        for share in self.namespaces.values_mut() {
            share.waiting.retain(|object| self.waiting.contains(object));
        }
        self.forget_idle();
    }

    fn forget_idle(&mut self) {
        self.namespaces.retain(|_, share| share.used > 0 || !share.waiting.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;

    use super::*;

    type Queue = FairQueue<PersistentVolumeClaim>;

    fn key(name: &str) -> ObjectRef<PersistentVolumeClaim> {
        ObjectRef::new(name).within(&name[..1])
    }

    fn with(slots: usize, names: &[&str]) -> Queue {
        let mut queue = FairQueue::new(slots);
        names.iter().for_each(|name| queue.push(key(name)));
        queue
    }

    /// Gives slots to all objects that may have one, and returns their names.
    fn granted(queue: &mut Queue) -> Vec<String> {
        std::iter::from_fn(|| queue.next()).map(|object| object.name).collect()
    }

    #[test]
    fn no_namespace_takes_all_slots() {
        let mut queue = with(8, &[]);
        for (namespace, count) in [("a", 4), ("b", 2), ("c", 1), ("d", 1), ("e", 0)] {
            (0..10).for_each(|number| queue.push(key(&format!("{namespace}{number}"))));
            assert_eq!(granted(&mut queue).len(), count, "{namespace}");
        }
    }

    #[test]
    fn a_backlog_delays_no_other_namespace() {
        let mut queue = with(2, &["a1", "a2", "a3"]);
        assert_eq!(granted(&mut queue), ["a1"]);
        queue.push(key("b1"));
        assert_eq!(granted(&mut queue), ["b1"]);
        queue.push(key("c1"));
        queue.end(&key("a1"));
        assert_eq!(granted(&mut queue), ["c1"]);
        queue.end(&key("b1"));
        queue.end(&key("c1"));
        assert_eq!(granted(&mut queue), ["a2"]);
    }

    #[test]
    fn an_object_is_granted_one_slot() {
        let mut queue = with(8, &["a1", "a1"]);
        assert_eq!(granted(&mut queue), ["a1"]);
        queue.push(key("a1"));
        queue.push(key("a1"));
        assert_eq!(granted(&mut queue), [""; 0]);
        queue.end(&key("a1"));
        assert_eq!(granted(&mut queue), ["a1"], "it was named while it had the slot");
        queue.end(&key("a1"));
        assert_eq!(granted(&mut queue), [""; 0]);
        assert!(queue.namespaces.is_empty() && queue.free == 8, "{queue:?}");
    }

    #[test]
    fn deleted_objects_leave_the_queue() {
        let mut queue = with(1, &["a1", "a2", "b1"]);
        queue.retain(|object| object.name == "b1");
        assert_eq!(queue.len(), 1);
        assert_eq!(granted(&mut queue), ["b1"]);
        assert_eq!(queue.namespaces.len(), 1);
    }
}
