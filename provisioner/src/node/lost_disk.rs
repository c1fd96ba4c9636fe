//! Finds PersistentVolumes of this node that are on a file system which the node does not have any more, and reconciles them.
//!
//! Only the node itself knows which file system it has.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::PersistentVolume;
use tokio::time::{sleep, timeout};

use super::context::Context;
use crate::{
    loss::{LossReconciler, LostStorage, NodeLoss, POLL_INTERVAL},
    objects::ownership,
    store::storage::State,
};

/// Wait after a change of the store, which can open and close many times in a row.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Checks for lost disks until shutdown.
pub(crate) async fn run(ctx: Arc<Context>, mode: NodeLoss) {
    ctx.synced().await;
    ctx.storage.tried().await;
    let mut losses = LossReconciler::new(&ctx.cluster, mode);
    let mut storage = ctx.storage.changes();
    loop {
        let next = losses.reconcile(on_other_disks(&ctx), Instant::now()).await;
        let wait = next.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL);
        if timeout(wait, storage.changed()).await.is_ok() {
            sleep(DEBOUNCE).await;
        }
    }
}

/// Returns the PersistentVolumes of this node that name another file system than the open store has. While the store is not
/// open, the node's file system is unknown and the result is empty.
fn on_other_disks(ctx: &Context) -> BTreeMap<LostStorage, Vec<Arc<PersistentVolume>>> {
    let present = match &*ctx.storage.changes().borrow() {
        State::Open(volumes) => volumes.filesystem_uuid(),
        State::Untried | State::Unavailable(_) | State::Absent(_) => return BTreeMap::new(),
    };
    let mut lost: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for volume in ctx.volumes.cache.state() {
        if let Some(uuid) =
            ownership::filesystem_uuid(&volume, &ctx.cluster.identity).filter(|of| *of != present)
        {
            lost.entry(LostStorage::Disk(uuid.to_owned())).or_default().push(Arc::clone(&volume));
        }
    }
    lost
}

#[cfg(test)]
mod tests {
    use http::Method;
    use serde_json::json;

    use super::*;
    use crate::testing::{
        fake_store::FakeStore,
        fixtures,
        mock_api_server::{Caches, TestContext, expect},
    };

    const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
    const GRACE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_volume_of_this_node_on_a_missing_disk_is_lost() {
        let policy = json!({"metadata": {"annotations": {
            "csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "60",
        }}});
        let mut elsewhere = policy.clone();
        fixtures::merge(
            &mut elsewhere,
            json!({"spec": {"csi": {"volumeAttributes": {"csi.loopfs.dev/filesystem-uuid": "another-disk"}}}}),
        );
        let mut here = policy;
        fixtures::merge(&mut here, json!({"metadata": {"name": "pvc-here"}}));
        let own = vec![fixtures::volume(elsewhere), fixtures::volume(here)];
        let claim = fixtures::bound_claim(json!({}));
        let preconditions =
            json!({"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version});
        let requests = vec![
            expect(Method::GET, CLAIM, None).respond(&claim),
            expect(Method::DELETE, CLAIM, json!({"preconditions": preconditions})),
        ];
        let caches = Caches { volumes: own, ..Caches::default() };
        let test_context = TestContext::new(FakeStore::of_size(loopfs::Bytes(1 << 30)), caches, requests);
        let ctx = Arc::clone(&test_context.ctx);
        let mut losses = LossReconciler::new(&ctx.cluster, NodeLoss::Enforce);
        let start = Instant::now();
        let first = losses.reconcile(on_other_disks(&ctx), start).await;
        assert_eq!(first, Some(GRACE));
        losses.reconcile(on_other_disks(&ctx), start + GRACE).await;
        drop(losses);
        drop(ctx);
        assert_eq!(test_context.finish().await, ["NodeLost", "NodeLost"]);
    }
}
