//! The time of an expansion that only the kubelet can notice.
//!
//! The driver's process is frozen while the images are expanded, so the provisioner leaves the last step to
//! the kubelet. Then the process is killed. The process that replaces it was not notified of the expansion.
//! It serves the kubelet's NodeExpandVolume within seconds, so the rest of the time is the wait for the
//! kubelet's next sync of the pod. Each volume has a pod of its own, because one sync covers all volumes of a
//! pod, which would be a single sample.

use anyhow::{Context, Result};
use futures::future::try_join_all;
use testvm_cluster::Node;
use testvm_cluster::api_error::api_error;
use testvm_cluster::containers::{Container, freeze, kill};
use testvm_cluster::waiting::{State, until_one};

use super::super::measurement::milliseconds;
use super::watched::{GROW_TIMEOUT, Watched};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::users::User;
use crate::test_env::workload::VolumeMode;

/// The number of volumes in a pod.
pub(super) const VOLUMES: u64 = 1;
const PODS: usize = 3;
/// The container of the process that serves the kubelet's calls.
const DRIVER: &str = "csi";

/// The state of a claim whose resize the kubelet has to complete.
const PENDING: &str = "NodeResizePending";
const IN_PROGRESS: &str = "NodeResizeInProgress";

/// Returns pods with a block volume each.
pub(super) fn users() -> Vec<User> {
    let user = |number: usize| {
        let name = format!("kubelet-{number}");
        User { claims: vec![(name.clone(), VolumeMode::Block)], name }
    };
    (0..PODS).map(user).collect()
}

/// Returns for each volume the milliseconds until its pod saw the new size.
pub(super) async fn samples(env: &TestEnv<'_>, node: &Node, users: &[User]) -> Result<Vec<f64>> {
    let of_all = users.iter().flat_map(|user| {
        let claims = user.claims.iter().map(|(claim, _)| claim.as_str());
        claims.zip(user.volumes()).map(move |(claim, volume)| (user.name.as_str(), claim, volume))
    });
    let all: Vec<(&str, &str, String)> = of_all.collect();
    let watched = all.iter().map(|(pod, claim, volume)| Watched::start(env, pod, claim, volume));
    let watched = try_join_all(watched).await?;
    let drivers = env.live_driver_pods().await?;
    let drivers = drivers.iter().map(|pod| Container::of(pod, DRIVER)).collect::<Result<Vec<_>>>()?;
    for driver in &drivers {
        freeze(node, driver).await?;
    }
    let seen = watched.into_iter().zip(&all).map(async |(watched, (_, claim, _))| {
        let took = watched.grow(GROW_TIMEOUT).await?;
        by_the_kubelet(env, claim).await?;
        anyhow::Ok(milliseconds(took))
    });
    let handed_over = async {
        try_join_all(all.iter().map(|(_, claim, _)| handed_over(env, claim))).await?;
        for driver in &drivers {
            kill(node, driver).await?;
        }
        Ok(())
    };
    let (samples, ()) = tokio::try_join!(try_join_all(seen), handed_over)?;
    Ok(samples)
}

/// Waits until the kubelet has to complete the resize.
async fn handed_over(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    let waited = until_one(env.claims(), claim, env.timeouts.grow, |claim| {
        let state = claim.and_then(claims::resize_state);
        State::ready_if(matches!(state, Some(PENDING | IN_PROGRESS)), format!("its resize is {state:?}"))
    });
    waited.await.with_context(|| format!("claim {claim} is not handed to the kubelet")).map(drop)
}

/// Checks that the kubelet expanded the volume: it records that in the claim before it calls the driver.
async fn by_the_kubelet(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    let now =
        env.claims().get(claim).await.map_err(api_error).with_context(|| format!("read claim {claim}"))?;
    let state = claims::resize_state(&now);
    anyhow::ensure!(state != Some(PENDING), "claim {claim} was expanded, but not by the kubelet");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pod_has_a_volume_of_its_own() {
        let users = users();
        assert_eq!(users.len(), PODS);
        let volumes: Vec<String> = users.iter().flat_map(User::volumes).collect();
        assert!(volumes.iter().all(|volume| volume.starts_with("block:")), "{volumes:?}");
        assert_eq!(volumes.len() as u64, PODS as u64 * VOLUMES);
    }
}
