//! Runs a provisioner on a fake store, for benchmarks without a disk.

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
    let mut provisioner = cluster.provisioner_on(HERE, &Arc::new(FakeStore::of_size(SIZE))).await;
    tokio::select! {
        _ = terminate.recv() => {}
        ended = provisioner.tasks.join_next() => panic!("{}", crate::tasks::ended_early(ended)),
    }
    cluster.finish([provisioner]).await;
}
