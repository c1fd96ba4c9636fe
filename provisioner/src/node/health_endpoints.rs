//! The HTTP endpoints `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use prometheus_client::registry::Registry;
use service::Gauges;

use crate::api::policies;
use crate::api::traffic::ApiTraffic;
use crate::node::context::Context;
use crate::node::resize;
use crate::objects::ownership;

/// The prefix of the metrics. csi/monitoring/README.md lists them.
const PREFIX: &str = "loopfs_provisioner";

/// The source of the health endpoints' responses.
pub(crate) struct NodeHealthEndpoints {
    pub(crate) ctx: Arc<Context>,
    pub(crate) traffic: ApiTraffic,
}

impl NodeHealthEndpoints {
    /// Returns the number of claims that only this node can serve and that have no volume yet.
    fn claims_waiting(&self) -> usize {
        let ctx = &self.ctx;
        let waits = |claim: &_| {
            ownership::is_claim_to_provision(claim, &ctx.cluster.identity)
                && ownership::selected_node(claim) == Some(ctx.cluster.identity.node())
                && !ownership::volume_id_for(claim).is_ok_and(|id| ctx.volume(id.as_str()).is_some())
        };
        ctx.claims.cache.state().iter().filter(|claim| waits(claim)).count()
    }

    /// Returns the number of claims of this node's volumes that request a larger size than they have.
    fn expansions_waiting(&self) -> usize {
        let ctx = &self.ctx;
        let waits = |claim: &PersistentVolumeClaim| {
            let volume = ownership::bound_volume(claim).and_then(|name| ctx.volume(name));
            volume.is_some_and(|volume| {
                resize::plan(claim, &volume, &ctx.cluster.identity) != resize::ResizePlan::UpToDate
            })
        };
        ctx.claims.cache.state().iter().filter(|claim| waits(claim)).count()
    }

    /// Registers the objects that wait for an attempt.
    fn register_waiting(&self, registry: &mut Registry) {
        let help = "Claims for which this node was selected and that have no volume yet";
        registry.count("claims_waiting", help, self.claims_waiting() as u64);
        let help = "Claims of this node's volumes that request a larger size than they have";
        registry.count("expansions_waiting", help, self.expansions_waiting() as u64);
        let (claims, volumes) = (self.ctx.claims.retries_waiting(), self.ctx.volumes.retries_waiting());
        let help = "Objects whose last attempt failed, and that are tried again after a wait";
        registry.counts("retries_waiting", help, "queue", [("claims", claims), ("volumes", volumes)]);
    }

    /// Returns `true` if this node never had storage: it has no record of a file system, and no PersistentVolume names it.
    /// It then serves no claims, and must not delay the rollout to the nodes that do.
    fn is_without_storage(&self) -> bool {
        let ctx = &self.ctx;
        ctx.storage.is_absent()
            && !ctx
                .volumes
                .cache
                .state()
                .iter()
                .any(|volume| ownership::is_our_volume(volume, &ctx.cluster.identity))
    }
}

impl service::HealthEndpoints for NodeHealthEndpoints {
    async fn metrics(&self) -> Result<Registry, String> {
        let ctx = &self.ctx;
        let mut registry = service::registry(PREFIX);
        ctx.operations.register(&mut registry);
        ctx.cluster.events.counter().register(&mut registry);
        self.traffic.register(&mut registry);
        self.traffic.register_latest(&mut registry);
        ctx.queues.register(&mut registry);
        ctx.claim_scope.register(&mut registry);
        policies::register(*ctx.policies.borrow(), &mut registry);
        ctx.storage.register(&mut registry);
        ctx.audit.register(&mut registry);
        self.register_waiting(&mut registry);
        Ok(registry)
    }

    /// Always succeeds. All tasks run, because the first to end would have ended the process. Restarting it repairs neither a disk
    /// nor an API server.
    async fn liveness(&self) -> Result<(), String> {
        Ok(())
    }

    /// Succeeds on a node whose caches were filled once and whose driver reports that the storage is open, and on a node without storage, which gets no claims.
    /// The latest response of the API server does not count: an API server that is overloaded would make the pods of all nodes
    /// not Ready at once, and no node can repair it.
    async fn readiness(&self) -> Result<(), String> {
        let ctx = &self.ctx;
        let caches = [
            ("claims", &ctx.claims.synced),
            ("volumes", &ctx.volumes.synced),
            ("storage classes", &ctx.classes_synced),
        ];
        if let Some((what, _)) = caches.iter().find(|(_, signal)| signal.get().is_none()) {
            return Err(format!("the {what} that the API server holds have not been read yet"));
        }
        match ctx.storage.driver() {
            Err(_) if self.is_without_storage() => Ok(()),
            usable => usable.map(drop).map_err(|error| error.to_string()),
        }
    }

    fn notice(&self) -> Option<String> {
        let unanswered = self.traffic.latest().and_then(Result::err);
        let unanswered = unanswered.map(|reason| format!("the API server does not answer: {reason}"));
        let notices: Vec<_> =
            unanswered.into_iter().chain(policies::notice(*self.ctx.policies.borrow())).collect();
        (!notices.is_empty()).then(|| notices.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use http::StatusCode;
    use loopfs::ErrorKind;
    use serde_json::json;
    use service::{HealthEndpoints as _, documentation};

    use super::*;
    use crate::api::events::Reason;
    use crate::api::request::ApiRequest;
    use crate::claim_labels::scope::ClaimScope;
    use crate::testing::mock_api_server::{Caches, TestContext};
    use crate::testing::{fake_store, fixtures};

    fn test_context(caches: Caches) -> (TestContext, NodeHealthEndpoints) {
        let test_context = TestContext::with(caches, vec![]);
        let endpoints =
            NodeHealthEndpoints { ctx: Arc::clone(&test_context.ctx), traffic: ApiTraffic::default() };
        (test_context, endpoints)
    }

    async fn scraped(endpoints: &NodeHealthEndpoints) -> String {
        let mut registry = endpoints.metrics().await.unwrap();
        service::register_readiness(&mut registry, true);
        documentation::page(&registry)
    }

    #[tokio::test]
    async fn served_metrics_are_the_documented_ones() {
        let (_bench, endpoints) = test_context(Caches::default());
        // Counters without a value are not served.
        endpoints.ctx.claim_scope.set(ClaimScope::All);
        endpoints.ctx.policies.send_replace(Some(true));
        drop(endpoints.ctx.queues.queue("claims"));
        endpoints.ctx.operations.ended("resize", Instant::now(), Ok(()));
        endpoints.ctx.cluster.events.publish_on_node(Reason::StorageReady, "mounted");
        endpoints.ctx.audit.set(Some(Default::default()));
        for verb in ["list", "create"] {
            let request = ApiRequest { verb, resource: "persistentvolumes".to_owned() };
            endpoints.traffic.ended(request, Ok(StatusCode::OK));
        }
        let watch = ApiRequest { verb: "watch", resource: "persistentvolumes".to_owned() };
        endpoints.traffic.delivered(&watch);
        documentation::assert_documented(&scraped(&endpoints).await, PREFIX);
    }

    #[tokio::test]
    async fn metrics_show_storage_and_caches() {
        let other =
            json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}, "name": "other"}});
        let claims = vec![fixtures::claim(json!({})), fixtures::claim(other)];
        let (test_context, endpoints) = test_context(Caches { claims, ..Caches::default() });
        endpoints.ctx.operations.ended("resize", Instant::now(), Ok(()));
        for _ in 0..2 {
            endpoints.ctx.cluster.events.publish_on_node(Reason::StorageUnavailable, "mount it");
        }
        let text = scraped(&endpoints).await;
        for line in [
            "claims_waiting 1",
            "storage_open 1",
            r#"operations_total{operation="resize",result="success",reason=""} 1"#,
            r#"events_total{type="Warning",reason="StorageUnavailable"} 2"#,
        ] {
            assert!(text.contains(&format!("\nloopfs_provisioner_{line}\n")), "{line} is not in {text}");
        }
        test_context.break_with(fake_store::error(ErrorKind::NotMounted, "mount it"));
        let text = scraped(&endpoints).await;
        assert!(text.contains("\nloopfs_provisioner_storage_open 0\n"), "{text}");
    }

    #[tokio::test]
    async fn metrics_count_claims_in_expansion() {
        for (size, waiting) in [("1Mi", 0), ("4Mi", 1)] {
            let request = json!({"spec": {"resources": {"requests": {"storage": size}}}});
            let claims = vec![fixtures::bound_claim(request)];
            let volumes = vec![fixtures::volume(json!({}))];
            let (_bench, endpoints) = test_context(Caches { claims, volumes, ..Caches::default() });
            let text = scraped(&endpoints).await;
            let line = format!("\nloopfs_provisioner_expansions_waiting {waiting}\n");
            assert!(text.contains(&line), "{line} is not in {text}");
        }
    }

    #[tokio::test]
    async fn readiness_needs_no_api_server() {
        let (test_context, endpoints) = test_context(Caches::default());
        let reachable =
            async || scraped(&endpoints).await.contains("\nloopfs_provisioner_api_server_reachable 1\n");
        assert_eq!(endpoints.readiness().await, Ok(()), "the caches are synced");
        assert_eq!(endpoints.notice(), None);
        endpoints.traffic.record(Err("list nodes: 429 Too Many Requests".to_owned()));
        assert_eq!(endpoints.readiness().await, Ok(()), "the caches were filled, and the store serves");
        let notice = endpoints.notice().unwrap();
        assert_eq!(notice, "the API server does not answer: list nodes: 429 Too Many Requests");
        assert!(!reachable().await);
        endpoints.traffic.record(Ok(()));
        assert_eq!(endpoints.notice(), None);
        assert!(reachable().await);
        test_context.break_with(fake_store::error(ErrorKind::NotMounted, "mount it"));
        let reason = endpoints.readiness().await.unwrap_err();
        assert!(reason.contains("mount it"), "{reason}");
        assert_eq!(endpoints.liveness().await, Ok(()), "a restart would not repair it");
        drop(endpoints);
        test_context.finish().await;
    }

    #[tokio::test]
    async fn node_without_policies_reports_it() {
        let (test_context, endpoints) = test_context(Caches::default());
        assert_eq!(endpoints.notice(), None);
        endpoints.ctx.policies.send_replace(Some(false));
        assert_eq!(endpoints.readiness().await, Ok(()));
        assert!(endpoints.notice().unwrap().contains("admission policies"));
        let text = scraped(&endpoints).await;
        assert!(text.contains("\nloopfs_provisioner_policies_enforced 0\n"), "{text}");
        drop(endpoints);
        test_context.finish().await;
    }

    #[tokio::test]
    async fn unused_node_is_ready_without_storage() {
        let volume = fixtures::volume(json!({}));
        for (volumes, ready) in [(vec![], true), (vec![volume], false)] {
            let (test_context, endpoints) = test_context(Caches { volumes, ..Caches::default() });
            test_context.break_with(fake_store::error(ErrorKind::NeverMounted, "nothing is mounted there"));
            match endpoints.readiness().await {
                Ok(()) => assert!(ready, "a volume names the node"),
                Err(reason) => assert!(!ready && reason.contains("nothing is mounted there"), "{reason}"),
            }
            drop(endpoints);
            test_context.finish().await;
        }
    }

    #[tokio::test]
    async fn readiness_awaits_all_caches() {
        let (test_context, mut endpoints) = test_context(Caches::default());
        let synced = &test_context.ctx;
        endpoints.ctx = Arc::new(Context::new(
            synced.cluster.clone(),
            test_context.volumes.clone(),
            synced.claims.cache.clone(),
            synced.volumes.cache.clone(),
            synced.classes.clone(),
            synced.now,
        ));
        endpoints.ctx.claims.synced.set(()).unwrap();
        assert!(endpoints.readiness().await.unwrap_err().contains("the volumes that the API server holds"));
    }
}
