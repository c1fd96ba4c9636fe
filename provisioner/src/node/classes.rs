//! Watches the storage classes, and requeues the claims that a change of one concerns.
//!
//! The events of claims and of classes arrive in any order. A claim that was reconciled before its class was known is reconciled
//! again when the class arrives. A claim that failed because of its class is reconciled again when the class changes. Claims of
//! other classes keep their back-off.

use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use tokio::sync::mpsc;

use crate::api::queue::{self, CacheChange};
use crate::node::context::Context;
use crate::objects::ownership;

/// Watches the classes until shutdown, and sends the claims that a change concerns to `related`.
pub(crate) async fn run(
    ctx: Arc<Context>,
    cache: Writer<StorageClass>,
    related: mpsc::UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
) {
    let classes = Api::all(ctx.cluster.client.clone());
    let changes = queue::watch(classes, watcher::Config::default(), cache, |_class| true);
    changes.for_each(async |change| observe(change, &ctx, &related)).await;
}

fn observe(
    change: CacheChange<StorageClass>,
    ctx: &Context,
    related: &mpsc::UnboundedSender<ObjectRef<PersistentVolumeClaim>>,
) {
    ctx.capacity.notify_one();
    let class = match change {
        CacheChange::Applied(class) | CacheChange::Deleted(class) => class.name_any(),
        // `Applied` of each class of the list follows.
        CacheChange::Listed => return drop(ctx.classes_synced.set(())),
    };
    for claim in ctx.claims.cache.state() {
        if ownership::class_name(&claim) == Some(class.as_str())
            && ownership::is_claim_to_provision(&claim, &ctx.cluster.identity)
        {
            // The controller no longer listens during shutdown.
            related.send(ObjectRef::from_obj(&*claim)).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{Caches, TestContext};

    fn class() -> Arc<StorageClass> {
        Arc::new(fixtures::class(json!({})))
    }

    #[rstest]
    #[case::the_class_arrives(CacheChange::Applied(class()), json!({}), true)]
    #[case::the_class_is_deleted(CacheChange::Deleted(class()), json!({}), true)]
    #[case::all_are_listed_and_follow(CacheChange::Listed, json!({}), false)]
    #[case::no_node_is_selected(CacheChange::Applied(class()), json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": null}}}), true)]
    #[case::of_another_class(CacheChange::Applied(class()), json!({"spec": {"storageClassName": "other"}}), false)]
    #[case::without_class(CacheChange::Applied(class()), json!({"spec": {"storageClassName": null}}), false)]
    #[case::with_a_volume(CacheChange::Applied(class()), json!({"spec": {"volumeName": "pvc-1"}}), false)]
    #[tokio::test]
    async fn changed_class_concerns_its_unprovisioned_claims(
        #[case] of_class: CacheChange<StorageClass>,
        #[case] of_claim: Value,
        #[case] expected: bool,
    ) {
        let claim = fixtures::claim(of_claim);
        let key = ObjectRef::from_obj(&claim);
        let caches = Caches { claims: vec![claim], ..Caches::default() };
        let test_context = TestContext::with(caches, vec![]);
        let (related, mut concerned) = mpsc::unbounded_channel();
        observe(of_class, &test_context.ctx, &related);
        assert_eq!(concerned.try_recv().ok(), expected.then_some(key));
        assert_eq!(concerned.try_recv().ok(), None);
    }
}
