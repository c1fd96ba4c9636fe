//! A volume, its snapshot and a copy of the snapshot are deleted in every order.

use std::collections::BTreeSet;

use anyhow::Result;
use futures::future::try_join_all;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Node, objects};

use super::names::SIZE;
use crate::e2e::stories::outages::until_bound;
use crate::test_env::environment::TestEnv;
use crate::test_env::snapshots::{contents, snapshots};
use crate::test_env::workload::{VolumeMode, name_of};
use crate::test_env::{claims, snapshots};

/// One of the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Volume,
    Snapshot,
    Restored,
}

use Part::{Restored, Snapshot, Volume};

const ORDERS: [[Part; 3]; 6] = [
    [Volume, Snapshot, Restored],
    [Volume, Restored, Snapshot],
    [Snapshot, Volume, Restored],
    [Snapshot, Restored, Volume],
    [Restored, Volume, Snapshot],
    [Restored, Snapshot, Volume],
];

/// The names of one set of the objects.
struct Set {
    volume: String,
    snapshot: String,
    copy: String,
    mode: VolumeMode,
}

pub(super) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    mode: VolumeMode,
) -> StepResult {
    let deleted = async {
        let sets = ORDERS.iter().enumerate().map(async |(index, order)| {
            let set = Set::of(index, mode);
            set.create(env, node).await?;
            for part in order {
                set.delete(env, *part).await?;
            }
            anyhow::Ok(())
        });
        try_join_all(sets).await.map(drop)
    };
    let title = format!("{mode}: a volume, its snapshot and a copy are deleted in every order");
    steps.step(&title, deleted).await
}

impl Set {
    fn of(index: usize, mode: VolumeMode) -> Set {
        let [volume, snapshot, copy] =
            ["volume", "snapshot", "copy"].map(|part| name_of(&format!("order-{index}-{part}"), mode));
        Set { volume, snapshot, copy, mode }
    }

    /// Creates the objects, without pods.
    async fn create(&self, env: &TestEnv<'_>, node: &Node) -> Result<()> {
        claims::request_on(env, node.name(), &self.volume, SIZE, self.mode).await?;
        until_bound(env, &BTreeSet::from([self.volume.clone()]), 1).await?;
        snapshots::request(env, &self.snapshot, &self.volume, None).await?;
        snapshots::ready(env, &self.snapshot).await?;
        let copy = snapshots::restored_claim(env, &self.copy, &self.snapshot, SIZE, self.mode)?;
        claims::create(env, &claims::with_selected_node(copy, node.name())).await?;
        until_bound(env, &BTreeSet::from([self.copy.clone()]), 1).await
    }

    /// Deletes one of the objects, and waits until the driver has deleted its data.
    async fn delete(&self, env: &TestEnv<'_>, part: Part) -> Result<()> {
        match part {
            Volume => claims::delete_with_volume(env, &self.volume).await,
            Restored => claims::delete_with_volume(env, &self.copy).await,
            Snapshot => {
                let content = snapshots::content_name(env, &self.snapshot).await?;
                objects::remove(snapshots(env), &self.snapshot, env.timeouts.end).await?;
                objects::until_gone(contents(env), &content, env.timeouts.end).await
            }
        }
    }
}
