//! Runs a provisioner on a fake store: for benchmarks without a disk, and for tests that stop and start the API server.

use std::sync::Arc;

use loopfs::Bytes;
use tokio::signal::unix::{SignalKind, signal};

use super::{Cluster, HERE};
use crate::testing::fake_store::FakeStore;

/// More than all claims of a benchmark request.
const SIZE: Bytes = Bytes(1 << 50);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "no test: it runs a provisioner until SIGTERM"]
async fn until_sigterm() {
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    let cluster = Cluster::connect().await;
    let store = Arc::new(FakeStore::of_size(SIZE));
    let mut provisioner = cluster.provisioner_on(HERE, &store).await;
    tokio::select! {
        _ = terminate.recv() => {}
        ended = provisioner.tasks.join_next() => panic!("{}", crate::tasks::ended_early(ended)),
    }
    for id in store.state().volumes.keys() {
        println!("volume {id}");
    }
    cluster.finish([provisioner]).await;
}
