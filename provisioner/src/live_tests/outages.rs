//! Tests of outages of the API server at chosen moments of provisioning.

use std::sync::atomic::{AtomicBool, Ordering};

use super::data_safety::TIMEOUTS;
use super::faulty_api_server::{Call, Fault, FaultyApiServer};
use super::*;
use crate::api::connection::Timeouts;

impl FaultyApiServer {
    async fn usual_provisioner(&self, cluster: &TestCluster) -> Provisioner {
        self.provisioner(cluster, Timeouts::default(), Options::default()).await
    }
}

impl TestCluster {
    /// Checks that there is one volume and one PersistentVolume, none of them pending.
    async fn expect_one_of_each(&self, claim: &str) {
        let object = self.bound(claim).await.name_any();
        assert_eq!(self.stored(), [object.as_str()]);
        let objects = self.objects().list(&ListParams::default()).await.unwrap();
        assert_eq!(objects.iter().filter(|object| is_of_test(object, &self.namespace)).count(), 1);
        until_none_pending(&self.volumes).await;
    }

    async fn volume_exists(&self) {
        eventually("a volume", || async { (self.stored().len() == 1).then_some(()) }).await;
    }
}

#[tokio::test]
async fn outage_after_volume_creation_duplicates_nothing() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let provisioner = api_server.usual_provisioner(&cluster).await;
    for claim in ["a", "b"] {
        api_server.set_once_created(&cluster.volumes, Fault::Disconnect);
        cluster.claim(claim, json!({})).await;
        cluster.volume_exists().await;
        let id = cluster.stored().remove(0);
        assert!(cluster.objects().get_opt(&id).await.unwrap().is_none(), "the API server was unreachable");
        api_server.heal();
        cluster.expect_one_of_each(claim).await;
        cluster.delete_claims(&[claim]).await;
    }
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn new_connections_end_a_silent_outage() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let timeouts = Timeouts { request: Duration::from_secs(2), silence: Duration::from_secs(3), ..TIMEOUTS };
    let provisioner = api_server.provisioner(&cluster, timeouts, Options::default()).await;
    cluster.claim("before", json!({})).await;
    cluster.bound("before").await;

    // The request that creates the PersistentVolume gets no response, and no watch delivers anything.
    let before = api_server.now();
    api_server.set_once_created(&cluster.volumes, Fault::Silence);
    cluster.claim("during", json!({})).await;
    for (verb, resource) in [
        ("create", "persistentvolumes"),
        ("watch", "persistentvolumes"),
        ("watch", "persistentvolumeclaims"),
        ("watch", "storageclasses"),
    ] {
        let silent = |call: &Call, fault| call.is(verb, resource) && fault == Some(Fault::Silence);
        api_server.until(before, 1, "a silent connection", silent).await;
    }
    api_server.heal();
    cluster.bound("during").await;
    cluster.claim("after", json!({})).await;
    cluster.bound("after").await;

    cluster.delete_claims(&["before", "during", "after"]).await;
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn crash_after_volume_leaves_no_orphan() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    for deletes_claim in [false, true] {
        let provisioner = api_server.usual_provisioner(&cluster).await;
        api_server.set_once_created(&cluster.volumes, Fault::Disconnect);
        cluster.claim("a", json!({})).await;
        cluster.volume_exists().await;
        provisioner.kill().await;
        api_server.heal();
        assert_eq!(cluster.volumes.state().pending.len(), 1);
        let id = cluster.stored().remove(0);
        if deletes_claim {
            cluster.delete_claim("a").await;
            until_deleted(&cluster.claims(), "a").await;
        }
        let next = api_server.usual_provisioner(&cluster).await;
        if deletes_claim {
            until_empty(&cluster.volumes).await;
            assert!(cluster.objects().get_opt(&id).await.unwrap().is_none());
        } else {
            cluster.expect_one_of_each("a").await;
            cluster.delete_claims(&["a"]).await;
        }
        next.stop().await;
    }
    cluster.finish([]).await;
}

/// Each fault of the watch, once, before a claim is created.
#[tokio::test]
async fn claim_is_served_after_watch_fault() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let provisioner = api_server.provisioner(&cluster, TIMEOUTS, Options::default()).await;
    let begins =
        |call: &Call, fault: Option<Fault>| call.is("watch", "persistentvolumeclaims") && fault.is_none();
    api_server.until(0, 1, "the watch begins", begins).await;
    for fault in Fault::OF_WATCHES {
        let name = format!("{fault:?}").to_lowercase();
        let (begun, is_injected) = (api_server.now(), AtomicBool::new(false));
        api_server.set(move |call| {
            let is_next =
                call.is("watch", "persistentvolumeclaims") && !is_injected.swap(true, Ordering::Relaxed);
            is_next.then_some(fault)
        });
        cluster.claim(&name, json!({})).await;
        cluster.bound(&name).await;
        assert_eq!(api_server.count(begun, |_, injected| injected == Some(fault)), 1);
        cluster.delete_claims(&[&name]).await;
    }
    cluster.finish([provisioner]).await;
}

/// Without its own writes, the provisioner would not know the PersistentVolume. Kubernetes changes it when it binds the claim, so the
/// provisioner can expand it only once the watch delivers again.
#[tokio::test]
async fn own_writes_count_without_the_watch() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    api_server.set(|call| call.is("watch", "persistentvolumes").then_some(Fault::Silence));
    let provisioner = api_server.provisioner(&cluster, TIMEOUTS, Options::default()).await;
    cluster.claim("data", json!({})).await;
    cluster.bound("data").await;
    cluster.request_size("data", "2Mi").await;
    let expands = |call: &Call, _: Option<Fault>| call.is("patch", "persistentvolumes");
    api_server.until(0, 1, "the provisioner records the new capacity", expands).await;
    assert_eq!(api_server.count(0, |call, _| call.is("event", "persistentvolumes")), 0);
    api_server.heal();
    until(&cluster.claims(), "data", |claim| size_of(claim) == Some(Bytes(2 * MIB))).await;
    assert_eq!(api_server.count(0, |call, _| call.is("create", "persistentvolumes")), 1);
    cluster.delete_claims(&["data"]).await;
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn expired_token_is_reported() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let provisioner = api_server.usual_provisioner(&cluster).await;
    let reports_refusal = async |refused: bool| {
        eventually(&format!("a refused token is reported: {refused}"), || async {
            let page = provisioner.page("/readyz").await;
            let is_reported = page.contains("the API server does not answer") && page.contains("401");
            (page.starts_with("HTTP/1.1 200") && is_reported == refused).then_some(())
        })
        .await;
    };
    reports_refusal(false).await;
    api_server.set(|_call| Some(Fault::ExpiredToken));
    let expired = api_server.now();
    cluster.claim("data", json!({})).await;
    reports_refusal(true).await;
    let creates = |call: &Call, _: Option<Fault>| call.is("create", "persistentvolumes");
    api_server.until(expired, 1, "the provisioner tries", creates).await;
    api_server.heal();
    cluster.expect_one_of_each("data").await;
    reports_refusal(false).await;
    cluster.delete_claims(&["data"]).await;
    cluster.finish([provisioner]).await;
}
