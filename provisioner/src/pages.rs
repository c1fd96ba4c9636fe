//! What is served over HTTP: `/metrics`, `/healthz` and `/readyz`.

use std::{sync::Arc, time::Duration};

use prometheus_client::registry::Registry;
use tokio::time::timeout;

use crate::{
    context::Context,
    metrics::{self, ApiWrites, Snapshot},
    ownership, provision,
};

/// How long the API server may take to say its version.
const API_TIME: Duration = Duration::from_secs(5);

/// What the pages say.
pub(crate) struct Pages {
    pub(crate) ctx: Arc<Context>,
    pub(crate) writes: ApiWrites,
}

impl Pages {
    /// Claims that only this node can serve and that have no volume yet.
    fn claims_waiting(&self) -> usize {
        let ctx = &self.ctx;
        let waits = |claim: &_| {
            ownership::is_claim_to_provision(claim, &ctx.identity)
                && ownership::selected_node(claim) == Some(ctx.identity.node())
                && !provision::volume_id(claim).is_ok_and(|id| ctx.volume(id.as_str()).is_some())
        };
        ctx.claims.state().iter().filter(|claim| waits(claim)).count()
    }

    /// Returns `true` if this node never had storage: it has no record of a file system, and no volume names it. It serves no
    /// claims then, and must not hold up the rollout to the nodes that do.
    fn is_without_storage(&self) -> bool {
        let ctx = &self.ctx;
        ctx.storage.is_absent()
            && !ctx.volumes.state().iter().any(|volume| ownership::is_our_volume(volume, &ctx.identity))
    }
}

impl monitoring::HealthEndpoints for Pages {
    async fn metrics(&self) -> Result<Registry, String> {
        let store = self.ctx.storage.run(|volumes| Ok((volumes.space()?, volumes.census()?))).await;
        let store =
            store.inspect_err(|error| tracing::debug!(%error, "there is nothing to tell of the store"));
        let audit = self.ctx.audit.get();
        let snapshot = Snapshot { claims_waiting: self.claims_waiting(), store: store.ok(), audit };
        Ok(metrics::register(&self.ctx.operations, self.ctx.events.told(), &self.writes, &snapshot))
    }

    /// Every part of the process runs, or the first to end would have ended it; and this one answers. Restarting it mends
    /// neither a disk nor an API server.
    async fn liveness(&self) -> Result<(), String> {
        Ok(())
    }

    /// Whether a claim would get its volume now. Succeeds on a node without storage, which is given no claims.
    async fn readiness(&self) -> Result<(), String> {
        let ctx = &self.ctx;
        let caches = [
            ("claims", &ctx.claims_synced),
            ("volumes", &ctx.volumes_synced),
            ("storage classes", &ctx.classes_synced),
        ];
        if let Some((what, _)) = caches.iter().find(|(_, gate)| !gate.is_open()) {
            return Err(format!("the {what} that the API server holds have not been read yet"));
        }
        match ctx.storage.run(|_volumes| Ok(())).await {
            Err(_) if self.is_without_storage() => {}
            usable => usable.map_err(|error| error.to_string())?,
        }
        match timeout(API_TIME, ctx.client.apiserver_version()).await {
            Ok(Ok(_version)) => Ok(()),
            Ok(Err(error)) => Err(format!("the API server does not answer: {error}")),
            Err(_elapsed) => Err(format!("the API server has not answered for {API_TIME:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use http::Method;
    use loopfs::{Bytes, ErrorKind, VolumeId, VolumeKind};
    use monitoring::{
        HealthEndpoints as _,
        documentation::{documented, served},
    };
    use prometheus_client::encoding::text;
    use serde_json::json;

    use super::*;
    use crate::{
        api_server::{Bench, Caches, Exchange, expect},
        audit::Findings,
        events::Reason,
        fixtures,
        metrics::Operation,
        volume_model::{self, VolumeModel},
    };

    fn bench(caches: Caches, exchanges: Vec<Exchange>) -> (Bench, Pages) {
        let bench = Bench::new(VolumeModel::of_size(Bytes(1 << 30)), caches, exchanges);
        let pages = Pages { ctx: Arc::clone(&bench.ctx), writes: ApiWrites::default() };
        (bench, pages)
    }

    async fn scraped(pages: &Pages) -> String {
        let mut text = String::new();
        text::encode(&mut text, &pages.metrics().await.unwrap()).unwrap();
        text
    }

    #[tokio::test]
    async fn what_is_served_is_what_is_documented() {
        let (_bench, pages) = bench(Caches::default(), vec![]);
        // What has never happened is not told.
        pages.ctx.operations.ended(Operation::Resize, Instant::now(), Ok(()));
        pages.ctx.events.publish_on_node(&fixtures::identity(), Reason::StorageReady, "mounted");
        pages.ctx.audit.set(Some(Findings::default()));
        pages.writes.ended("create", "persistentvolumes".to_owned(), "201".to_owned());
        let readme = include_str!("../README.md");
        assert_eq!(served(&scraped(&pages).await), documented(readme, "loopfs_provisioner_"));
    }

    #[tokio::test]
    async fn figures_are_those_of_the_store_and_the_caches() {
        let other =
            json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}, "name": "other"}});
        let claims = vec![fixtures::claim(json!({})), fixtures::claim(other)];
        let (bench, pages) = bench(Caches { claims, ..Caches::default() }, vec![]);
        let id = VolumeId::parse("disk").unwrap();
        bench.volumes.state().volumes.insert(id, (VolumeKind::Block, Bytes(4096)));
        bench.volumes.state().trash.push(Bytes(4096));
        pages.ctx.operations.ended(Operation::Resize, Instant::now(), Ok(()));
        for _ in 0..2 {
            pages.ctx.events.publish_on_node(&fixtures::identity(), Reason::StorageUnavailable, "mount it");
        }
        let text = scraped(&pages).await;
        for line in [
            "claims_waiting 1",
            "storage_open 1",
            "store_capacity_bytes 1073741824",
            "store_available_bytes 1073733632",
            "store_promised_bytes 8192",
            r#"volumes{kind="Filesystem"} 0"#,
            r#"volumes{kind="Block"} 1"#,
            "trash_entries 1",
            r#"operations_total{operation="resize",result="success",reason=""} 1"#,
            r#"events_total{type="Warning",reason="StorageUnavailable"} 2"#,
        ] {
            assert!(text.contains(&format!("\nloopfs_provisioner_{line}\n")), "{line} is not in {text}");
        }
    }

    #[tokio::test]
    async fn nothing_is_told_of_a_store_that_cannot_be_used() {
        let (bench, pages) = bench(Caches::default(), vec![]);
        bench.volumes.state().broken = Some(volume_model::error(ErrorKind::NotMounted, "mount it"));
        let text = scraped(&pages).await;
        assert!(text.contains("\nloopfs_provisioner_storage_open 0\n"), "{text}");
        assert!(!text.contains("store_capacity"), "{text}");
    }

    fn version() -> Exchange {
        let answer = json!({
            "major": "1", "minor": "36", "gitVersion": "v1.36.0", "gitCommit": "", "gitTreeState": "", "buildDate": "",
            "goVersion": "", "compiler": "", "platform": "",
        });
        expect(Method::GET, "/version", None).answer(answer)
    }

    #[tokio::test]
    async fn ready_is_who_has_read_all_and_reaches_both_sides() {
        let refused = version().refuse(503, "ServiceUnavailable");
        let (bench, pages) = bench(Caches::default(), vec![version(), refused]);
        assert_eq!(pages.readiness().await, Ok(()));
        let told = pages.readiness().await.unwrap_err();
        assert!(told.contains("the API server does not answer"), "{told}");
        bench.volumes.state().broken = Some(volume_model::error(ErrorKind::NotMounted, "mount it"));
        let told = pages.readiness().await.unwrap_err();
        assert!(told.contains("mount it"), "{told}");
        assert_eq!(pages.liveness().await, Ok(()), "a restart would not mend it");
        drop(pages);
        bench.finish().await;
    }

    #[tokio::test]
    async fn a_node_that_never_had_storage_is_ready_unless_a_volume_names_it() {
        let volume = fixtures::volume(json!({}));
        for (volumes, ready) in [(vec![], true), (vec![volume], false)] {
            let answers = if ready { vec![version()] } else { vec![] };
            let (bench, pages) = bench(Caches { volumes, ..Caches::default() }, answers);
            let broken = volume_model::error(ErrorKind::NeverMounted, "nothing is mounted there");
            bench.volumes.state().broken = Some(broken);
            match pages.readiness().await {
                Ok(()) => assert!(ready, "a volume names the node"),
                Err(reason) => assert!(!ready && reason.contains("nothing is mounted there"), "{reason}"),
            }
            drop(pages);
            bench.finish().await;
        }
    }

    #[tokio::test]
    async fn who_has_not_read_all_is_not_ready() {
        let (bench, mut pages) = bench(Caches::default(), vec![]);
        pages.ctx = Arc::new(crate::context::Context::new(crate::context::Given {
            client: bench.ctx.client.clone(),
            identity: fixtures::identity(),
            events: bench.ctx.events.clone(),
            storage: Arc::clone(&bench.ctx.storage),
            intents: bench.ctx.intents.clone(),
            claims: bench.ctx.claims.clone(),
            volumes: bench.ctx.volumes.clone(),
            classes: bench.ctx.classes.clone(),
            now: bench.ctx.now,
        }));
        pages.ctx.claims_synced.open();
        assert!(pages.readiness().await.unwrap_err().contains("the volumes that the API server holds"));
    }
}
