//! Returns the newest version of each object that this process has seen, including its own writes.
//!
//! A watch cache lags behind: between a write and the watch event that shows it, a reconcile would decide on
//! an old version, and either do the work twice or fail with a conflict. The object that a write returned is therefore kept until
//! the watch cache holds a version that is at least as new. The reflectors of kube hold only what their watch has delivered.

use std::collections::HashMap;
use std::sync::Arc;

use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};
use parking_lot::Mutex;

/// Written objects that the watch cache does not hold yet.
pub(crate) struct MutationCache<K: Resource<DynamicType = ()>> {
    written: Mutex<HashMap<ObjectRef<K>, Arc<K>>>,
}

impl<K: Resource<DynamicType = ()>> Default for MutationCache<K> {
    fn default() -> Self {
        MutationCache { written: Mutex::default() }
    }
}

impl<K: Resource<DynamicType = ()>> MutationCache<K> {
    /// Stores an object as the API server returned it from a write.
    pub(crate) fn remember(&self, written: K) -> Arc<K> {
        let written = Arc::new(written);
        self.written.lock().insert(ObjectRef::from_obj(&*written), Arc::clone(&written));
        written
    }

    /// Returns the newer of the cached object and its last written version.
    pub(crate) fn newest(&self, cached: Arc<K>) -> Arc<K> {
        let key = ObjectRef::from_obj(&*cached);
        let mut written = self.written.lock();
        match written.get(&key) {
            Some(own) if supersedes(&**own, &*cached) => Arc::clone(own),
            Some(_) => {
                written.remove(&key);
                cached
            }
            None => cached,
        }
    }

    /// Returns the last written version of an object that the watch cache does not hold yet.
    pub(crate) fn get(&self, key: &ObjectRef<K>) -> Option<Arc<K>> {
        self.written.lock().get(key).cloned()
    }

    /// Removes an object, because it was deleted or because a write to it failed: the stored version may then be as stale as the
    /// watch cache.
    pub(crate) fn forget(&self, key: &ObjectRef<K>) {
        self.written.lock().remove(key);
    }

    /// Keeps only the objects that `wanted` selects, for objects that were deleted while the watch was interrupted.
    pub(crate) fn retain(&self, wanted: impl Fn(&ObjectRef<K>) -> bool) {
        self.written.lock().retain(|key, _| wanted(key));
    }
}

/// Returns `true` if a write removed the object: it was marked for deletion, and its last finalizer was removed.
fn is_removed<K: Resource>(written: &K) -> bool {
    written.meta().deletion_timestamp.is_some() && written.finalizers().is_empty()
}

/// Returns `true` if `own` is the same object as `cached` at a later resource version, or removed: the write that removes an object
/// returns the resource version of before.
///
/// Resource versions of one resource type compare as numbers (Kubernetes 1.35 made it part of the API
/// contract). If one is no number, or the object is another of the same name, the watch cache wins: the
/// following write has a precondition.
fn supersedes<K: Resource>(own: &K, cached: &K) -> bool {
    let version = |object: &K| object.resource_version().and_then(|version| version.parse::<u128>().ok());
    let is_newer = || matches!((version(own), version(cached)), (Some(own), Some(cached)) if own > cached);
    own.meta().uid == cached.meta().uid && (is_removed(own) || is_newer())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use rstest::rstest;

    use super::*;

    fn claim(uid: &str, version: &str) -> PersistentVolumeClaim {
        let mut claim = PersistentVolumeClaim::default();
        claim.metadata.namespace = Some("ns".to_owned());
        claim.metadata.name = Some("data".to_owned());
        claim.metadata.uid = Some(uid.to_owned());
        claim.metadata.resource_version = Some(version.to_owned());
        claim
    }

    #[rstest]
    #[case::cache_lags("10", "u", "9", "10")]
    #[case::cache_caught_up("10", "u", "10", "10")]
    #[case::cache_is_ahead("10", "u", "11", "11")]
    #[case::recreated_under_the_same_name("10", "other", "9", "9")]
    #[case::versions_that_do_not_compare("10", "u", "opaque", "opaque")]
    fn the_newer_version_is_returned(
        #[case] own: &str,
        #[case] uid: &str,
        #[case] cached: &str,
        #[case] expected: &str,
    ) {
        let writes = MutationCache::default();
        writes.remember(claim("u", own));
        let newest = writes.newest(Arc::new(claim(uid, cached)));
        assert_eq!(newest.resource_version().as_deref(), Some(expected));
    }

    #[test]
    fn entry_is_removed_after_catching_up() {
        let writes = MutationCache::default();
        writes.remember(claim("u", "10"));
        writes.newest(Arc::new(claim("u", "10")));
        assert_eq!(writes.get(&ObjectRef::new("data").within("ns")), None);
    }

    #[rstest]
    #[case::same_object("u", true)]
    #[case::recreated_under_the_same_name("other", false)]
    fn removed_object_stays_removed(#[case] cached: &str, #[case] expected: bool) {
        let writes = MutationCache::default();
        let mut last = claim("u", "10");
        last.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        writes.remember(last);
        assert_eq!(is_removed(&*writes.newest(Arc::new(claim(cached, "11")))), expected);
    }

    #[test]
    fn entry_is_removed_after_failed_write() {
        let writes = MutationCache::default();
        writes.remember(claim("u", "10"));
        writes.forget(&ObjectRef::new("data").within("ns"));
        let newest = writes.newest(Arc::new(claim("u", "9")));
        assert_eq!(newest.resource_version().as_deref(), Some("9"));
    }
}
