//! Pods with many claims each, for stories and measurements that need many volumes in use.

use std::time::Duration;

use anyhow::Result;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{Pod, Toleration};
use testvm_cluster::objects;
use testvm_cluster::waiting::until_none_complains;

use super::claims;
use super::environment::TestEnv;
use super::sizes::Size;
use super::workload::{Held, VolumeMode, holder_of};

/// A pod and its claims.
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) claims: Vec<(String, VolumeMode)>,
}

impl User {
    fn path(claim: &str) -> String {
        format!("/vol/{claim}")
    }

    pub(crate) fn pod(&self) -> Result<Pod> {
        let paths: Vec<String> = self.claims.iter().map(|(claim, _)| User::path(claim)).collect();
        let held = self.claims.iter().zip(&paths).map(|((claim, mode), path)| Held {
            claim,
            path,
            mode: *mode,
            read_only: false,
        });
        let mut pod = holder_of(&self.name, &held.collect::<Vec<_>>())?;
        // It stays while its node boots, however long that takes.
        let stays = Toleration {
            effect: Some("NoExecute".into()),
            operator: Some("Exists".into()),
            ..Default::default()
        };
        pod.spec.get_or_insert_default().tolerations = Some(vec![stays]);
        Ok(pod)
    }

    /// Returns the volumes of the claims, in the syntax of the test program.
    pub(crate) fn volumes(&self) -> Vec<String> {
        let volume = |(claim, mode): &(String, VolumeMode)| match mode {
            VolumeMode::Filesystem => format!("writable:{}", User::path(claim)),
            VolumeMode::Block => format!("block:{}", User::path(claim)),
        };
        self.claims.iter().map(volume).collect()
    }
}

/// Creates the claims and starts the pods, and returns the running pods.
pub(crate) async fn start(env: &TestEnv<'_>, users: &[User], size: Size) -> Result<Vec<Pod>> {
    let claims = users.iter().flat_map(|user| &user.claims);
    try_join_all(claims.map(async |(name, mode)| claims::request(env, name, size, *mode).await)).await?;
    for user in users {
        objects::create(&env.pods(), &user.pod()?).await?;
    }
    until_pods(env, users, env.timeouts.start, |pod| (!is_ready(pod)).then(|| "is not ready".to_owned()))
        .await
}

/// Waits until `complaint` returns nothing for any of the pods, and returns the pods.
pub(crate) async fn until_pods(
    env: &TestEnv<'_>,
    users: &[User],
    within: Duration,
    complaint: impl Fn(&Pod) -> Option<String>,
) -> Result<Vec<Pod>> {
    let names: Vec<&str> = users.iter().map(|user| user.name.as_str()).collect();
    until_none_complains(env.pods(), "pod", &names, within, complaint).await
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
