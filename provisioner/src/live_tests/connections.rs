//! Tests of the TCP connections to the API server.
//!
//! The requests pass through a forwarder of bytes. So the provisioner and the API server agree on HTTP/2 as they do without it, and
//! the test decides which connections still deliver.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::copy_bidirectional;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::io::InspectReader;
use tokio_util::task::AbortOnDropHandle;

use super::data_safety::TIMEOUTS;
use super::*;
use crate::api::client;
use crate::api::connection::{self, Timeouts};

struct Forwarder {
    client: Client,
    traffic: ApiTraffic,
    shared: Arc<Connections>,
    _accepting: AbortOnDropHandle<()>,
}

struct Connections {
    api_server: String,
    accepted: AtomicUsize,
    open: watch::Sender<usize>,
    /// The number of bytes that the API server sent.
    received: AtomicUsize,
    /// The number of connections, the first ones accepted, that stay open and deliver nothing.
    silent: watch::Sender<usize>,
}

impl Forwarder {
    async fn start(timeouts: Timeouts) -> Self {
        let mut config = client::config(Some(TestCluster::kubeconfig_of(HERE))).await.unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let api_server = config.cluster_url.authority().unwrap().to_string();
        config.tls_server_name = Some(config.cluster_url.host().unwrap().to_owned());
        config.cluster_url = format!("https://{}", listener.local_addr().unwrap()).parse().unwrap();
        let shared = Arc::new(Connections {
            api_server,
            accepted: AtomicUsize::default(),
            open: watch::Sender::default(),
            received: AtomicUsize::default(),
            silent: watch::Sender::default(),
        });
        let accepting = AbortOnDropHandle::new(tokio::spawn(accept(listener, Arc::clone(&shared))));
        let traffic = ApiTraffic::default();
        let client = connection::client(config, timeouts, &traffic).unwrap();
        Forwarder { client, traffic, shared, _accepting: accepting }
    }

    async fn provisioner(&self, cluster: &TestCluster) -> Provisioner {
        let (client, traffic) = (self.client.clone(), self.traffic.clone());
        cluster.start(HERE, &cluster.volumes, Options::default(), client, traffic).await
    }

    async fn until_open(&self, expected: usize) {
        let mut open = self.shared.open.subscribe();
        let reached = tokio::time::timeout(TIMEOUT, open.wait_for(|open| *open == expected)).await;
        assert!(reached.is_ok(), "{expected} connections expected, {} are open", *self.shared.open.borrow());
    }

    fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, shared: Arc<Connections>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _peer)) = listener.accept().await {
        connections.spawn(forward(stream, Arc::clone(&shared)));
    }
}

async fn forward(mut stream: TcpStream, shared: Arc<Connections>) {
    let number = shared.accepted.fetch_add(1, Ordering::Relaxed);
    shared.open.send_modify(|open| *open += 1);
    let api_server = TcpStream::connect(&shared.api_server).await.unwrap();
    let mut api_server = InspectReader::new(api_server, |bytes| {
        shared.received.fetch_add(bytes.len(), Ordering::Relaxed);
    });
    let mut silent = shared.silent.subscribe();
    tokio::select! {
        // An error ends the connection too.
        _ended = copy_bidirectional(&mut stream, &mut api_server) => {}
        _is_silent = async { silent.wait_for(|silent| number < *silent).await.is_ok() } => {
            // The provisioner must end it. What it sends in the meantime is read, so that its end is seen.
            tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.ok();
        }
    }
    shared.open.send_modify(|open| *open -= 1);
}

#[tokio::test]
async fn all_requests_share_one_connection() {
    let cluster = TestCluster::connect().await;
    let forwarder = Forwarder::start(Timeouts::default()).await;
    let provisioner = forwarder.provisioner(&cluster).await;
    // The first requests may have begun to connect at the same time.
    cluster.claim("first", json!({})).await;
    cluster.bound("first").await;
    forwarder.until_open(1).await;
    let accepted = forwarder.accepted();
    for claim in ["a", "b", "c"] {
        cluster.claim(claim, json!({})).await;
    }
    for claim in ["a", "b", "c"] {
        cluster.bound(claim).await;
    }
    cluster.delete_claims(&["first", "a", "b", "c"]).await;
    assert_eq!((forwarder.accepted(), *forwarder.shared.open.borrow()), (accepted, 1));
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn lists_are_compressed_on_the_connection() {
    const CLAIMS: usize = 200;
    let cluster = TestCluster::connect().await;
    let forwarder = Forwarder::start(Timeouts::default()).await;
    for number in 0..CLAIMS {
        cluster.claim(&format!("data-{number}"), json!({"metadata": {"annotations": null}})).await;
    }
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(forwarder.client.clone(), &cluster.namespace);
    let listed = claims.list(&ListParams::default()).await.unwrap().items;
    assert_eq!(listed.len(), CLAIMS);
    let size = serde_json::to_vec(&listed).unwrap().len();
    let received = forwarder.shared.received.load(Ordering::Relaxed);
    assert!(received < size / 4, "{received} bytes were received for a list of {size} bytes");
    cluster.finish([]).await;
}

/// Neither the deadline of requests nor that of watches ends in this test.
#[tokio::test]
async fn silent_connection_is_replaced_after_ping() {
    let cluster = TestCluster::connect().await;
    let timeouts = Timeouts { ping: TIMEOUTS.ping, ..Timeouts::default() };
    let forwarder = Forwarder::start(timeouts).await;
    let provisioner = forwarder.provisioner(&cluster).await;
    cluster.claim("before", json!({})).await;
    cluster.bound("before").await;
    forwarder.until_open(1).await;
    let accepted = forwarder.accepted();
    forwarder.shared.silent.send_replace(accepted);
    cluster.claim("after", json!({})).await;
    cluster.bound("after").await;
    forwarder.until_open(1).await;
    assert!(forwarder.accepted() > accepted);
    cluster.delete_claims(&["before", "after"]).await;
    cluster.finish([provisioner]).await;
}
