//! Runs provisioners on fake stores: for benchmarks without disks, and for tests that stop and start the API server or the processes.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, future, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use loopfs::Bytes;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{HERE, Provisioner, TestCluster, administrator, claim_labels, kubeconfig_names, pods_of_driver};
use crate::api::client;
use crate::api::connection::{self, Timeouts};
use crate::api::traffic::ApiTraffic;
use crate::loss::NodeLoss;
use crate::node::process::Options;
use crate::testing::fake_store::FakeStore;

/// More than all claims of a benchmark request.
const SIZE: Bytes = Bytes(1 << 50);

/// The number of provisioners that start concurrently. On a cluster, each has a processor of its own.
const START_CONCURRENCY: usize = 32;
/// The variable of [`until_sigterm`] with the seconds after which a silent watch ends.
const WATCH_SILENCE: &str = "PROVISIONER_WATCH_SILENCE";
/// The line on standard error after all provisioners are ready. The benchmark waits for it.
const ALL_READY: &str = "all provisioners are ready";

/// Runs the provisioner of one node, with the deadlines of the driver unless [`WATCH_SILENCE`] is set.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "no test: it runs a provisioner until SIGTERM"]
async fn until_sigterm() {
    let terminate = signal(SignalKind::terminate()).unwrap();
    let cluster = TestCluster::connect().await;
    let store = Arc::new(FakeStore::of_size(SIZE));
    let traffic = ApiTraffic::default();
    let config = client::config(Some(TestCluster::kubeconfig_of(HERE))).await.unwrap();
    let client = connection::client(config, timeouts(), &traffic).unwrap();
    let provisioner = cluster.start(HERE, &store, Options::default(), client, traffic).await;
    serve(cluster, provisioner, &store, terminate).await;
}

/// Waits for SIGTERM, stops the process and prints the volumes in its store.
async fn serve(cluster: TestCluster, mut process: Provisioner, store: &FakeStore, mut terminate: Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        error = process.tasks.ended_early() => panic!("{error}"),
    }
    cluster.finish([process]).await;
    for id in store.state().volumes.keys() {
        println!("volume {id}");
    }
}

fn timeouts() -> Timeouts {
    let defaults = Timeouts::default();
    let seconds = std::env::var(WATCH_SILENCE).ok().map(|text| text.parse().expect(WATCH_SILENCE));
    Timeouts { silence: seconds.map_or(defaults.silence, Duration::from_secs), ..defaults }
}

fn options_with_labels() -> Options {
    Options { node_loss: NodeLoss::DryRun, claim_labels: Some(claim_labels::source()), ..Options::default() }
}

/// Runs a provisioner for each kubeconfig of a node, with the component claim-labels. All share this process and nothing else.
#[test]
#[ignore = "no test: it runs the provisioners of many nodes until SIGTERM"]
fn fleet_until_sigterm() {
    tokio::runtime::Runtime::new().unwrap().block_on(serve_fleet());
}

async fn serve_fleet() {
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    let pods = pods_of_driver(&administrator().await).await;
    let mut fleet: Vec<Provisioner> = stream::iter(kubeconfig_names())
        .map(|node| start_of_fleet(pods[&node].clone(), node))
        .buffer_unordered(START_CONCURRENCY)
        .collect()
        .await;
    eprintln!("{ALL_READY}");
    let first_end = future::select_all(fleet.iter_mut().map(|one| Box::pin(one.tasks.ended_early())));
    tokio::select! {
        _ = terminate.recv() => {}
        (error, _, _) = first_end => panic!("{error}"),
    }
    future::join_all(fleet.into_iter().map(Provisioner::stop)).await;
}

/// Starts the provisioner of a node, and waits until it can serve claims and watches only its own.
async fn start_of_fleet(pod: OwnerReference, node: String) -> Provisioner {
    let traffic = ApiTraffic::default();
    let kubeconfig = TestCluster::kubeconfig_of(&node);
    let client = crate::api::client::connect(Some(kubeconfig), &traffic).await.unwrap();
    let volumes = Arc::new(FakeStore::of_size(SIZE));
    let provisioner = Provisioner::start(&node, &volumes, pod, options_with_labels(), client, traffic).await;
    provisioner.until_ready().await;
    provisioner.until_it_watches_all_claims(false).await;
    provisioner
}
