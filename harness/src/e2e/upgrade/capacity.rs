//! The free capacity that a node publishes.

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::Api;
use kube::runtime::watcher;
use testvm_cluster::Node;
use testvm_cluster::waiting::{State, until};

use crate::e2e::parts::full_node::largest;
use crate::test_env::environment::TestEnv;

/// The space that XFS and the store may keep for records of volumes. The deleted volumes had four times as much.
const SLACK: u64 = 2 << 20;

/// Waits until the node publishes a capacity, and returns it in bytes.
pub(super) async fn published(env: &TestEnv<'_>, node: &Node) -> Result<u64> {
    at_least(env, node, 1).await
}

/// Waits until the node publishes at least these bytes, but for [`SLACK`] and for the inodes of a Filesystem volume. The version
/// that the lane begins with reserves none.
pub(super) async fn given_back(env: &TestEnv<'_>, node: &Node, bytes: u64) -> Result<()> {
    at_least(env, node, (bytes - bytes / 8).saturating_sub(SLACK)).await.map(drop)
}

async fn at_least(env: &TestEnv<'_>, node: &Node, bytes: u64) -> Result<u64> {
    let api: Api<CSIStorageCapacity> = Api::all(env.client.clone());
    let published = until(api, watcher::Config::default(), env.timeouts.end, |capacities| {
        let now = largest(env, node, capacities.values()).and_then(|quantity| parse(&quantity.0));
        State::ready_if(
            now.is_some_and(|now| now >= bytes),
            format!("{} publishes {now:?} bytes of {bytes}", node.name()),
        )
    });
    let published = published.await?;
    let capacity = largest(env, node, published.values()).and_then(|quantity| parse(&quantity.0));
    capacity.context("the capacity is a number of bytes")
}

/// Parses a quantity as the provisioner writes it: a whole number with a binary suffix.
fn parse(quantity: &str) -> Option<u64> {
    let digits = quantity.trim_end_matches(|c: char| !c.is_ascii_digit());
    let exponent =
        ["", "Ki", "Mi", "Gi", "Ti"].iter().position(|suffix| *suffix == &quantity[digits.len()..])?;
    digits.parse::<u64>().ok()?.checked_mul(1 << (10 * exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_of_the_provisioner_become_bytes() {
        let parsed = ["0", "512", "3Ki", "5Mi", "1Gi", "", "x", "1.5Gi", "1e3", "1M"].map(parse);
        let expected = [Some(0), Some(512), Some(3 << 10), Some(5 << 20), Some(1 << 30)];
        assert_eq!(parsed[..5], expected);
        assert_eq!(parsed[5..], [None; 5]);
    }
}
