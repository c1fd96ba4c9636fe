//! A provisioner for those who measure what it takes to serve claims where no disk has a part in it.

use std::sync::Arc;

use loopfs::Bytes;
use tokio::signal::unix::{SignalKind, signal};

use super::{Cluster, HERE};
use crate::testing::fake_store::FakeStore;

/// More than anybody asks for.
const SIZE: Bytes = Bytes(1 << 50);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "no test: it serves until SIGTERM"]
async fn until_sigterm() {
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    let cluster = Cluster::connect().await;
    let mut provisioner = cluster.provisioner_on(HERE, &Arc::new(FakeStore::of_size(SIZE))).await;
    tokio::select! {
        _ = terminate.recv() => {}
        ended = provisioner.tasks.join_next() => panic!("{}", crate::tasks::ended_early(ended)),
    }
    provisioner.stop().await;
    cluster.finish().await;
}
