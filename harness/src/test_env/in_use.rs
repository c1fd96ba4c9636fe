//! Volumes in use: a pod writes to a Filesystem and a Block volume, and another pod has the former read-only.

use anyhow::Result;
use kube::ResourceExt;
use testvm_cluster::containers::Container;
use testvm_cluster::objects;

use super::environment::TestEnv;
use super::sizes::Size;
use super::users::User;
use super::workload::{VolumeMode, name_of};
use super::{claims, pods};

/// The size of new volumes, and by how much each expansion enlarges them.
const STEP: Size = Size::mebibytes(1);

/// Two volumes and the pods that use them.
pub(crate) struct InUse {
    writer: User,
    reader: String,
    size: Size,
}

impl InUse {
    /// Begins the names of the claims and the pods with `prefix`.
    pub(crate) fn of(prefix: &str) -> InUse {
        let claim = |mode: VolumeMode| (name_of(prefix, mode), mode);
        let claims = vec![claim(VolumeMode::Filesystem), claim(VolumeMode::Block)];
        let writer = User { name: format!("{prefix}-writer"), claims };
        InUse { writer, reader: format!("{prefix}-reader"), size: STEP }
    }

    /// Creates the claims and the pods, and has the first pod check the volumes and write to them.
    pub(crate) async fn create(&self, env: &TestEnv<'_>) -> Result<()> {
        for (name, mode) in &self.writer.claims {
            claims::request(env, name, STEP, *mode).await?;
        }
        pods::create(env, &self.writer.pod()?).await?;
        pods::start_read_only(env, &self.reader, &self.writer.claims[0].0, VolumeMode::Filesystem).await?;
        pods::check_new(env, &self.writer.name, STEP, &self.writer.volumes()).await
    }

    /// Checks that the volumes have their data and exactly their size, that the first pod can write to them up to their limit, and that
    /// the other one cannot write.
    pub(crate) async fn check(&self, env: &TestEnv<'_>) -> Result<()> {
        let sizes = [STEP, self.size];
        pods::check_kept(env, &self.writer.name, sizes, &self.writer.volumes()).await?;
        pods::check_kept(env, &self.reader, sizes, &["readonly:/vol".to_owned()]).await?;
        // check-new wrote this.
        pods::check_text(env, &self.reader, "/vol/kept", &STEP.bytes().to_string()).await
    }

    /// Expands the volumes, and checks them at their new size.
    pub(crate) async fn expand(&mut self, env: &TestEnv<'_>) -> Result<()> {
        self.size = Size::mebibytes((self.size.bytes() + STEP.bytes()) >> 20);
        for (name, _) in &self.writer.claims {
            claims::request_size(env, name, self.size).await?;
        }
        for (name, _) in &self.writer.claims {
            claims::until_expanded(env, name, self.size).await?;
        }
        self.check(env).await
    }

    /// Ends the pods, and deletes the claims with their volumes.
    pub(crate) async fn delete(&self, env: &TestEnv<'_>) -> Result<()> {
        pods::end(env, &self.reader).await?;
        pods::end(env, &self.writer.name).await?;
        for (name, _) in &self.writer.claims {
            claims::delete_with_volume(env, name).await?;
        }
        Ok(())
    }
}

/// Returns the identities of the containers of all pods. That of a container changes if it is restarted.
pub(crate) async fn running(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let pods = objects::list(&env.pods(), "").await?;
    let identities = pods.iter().flat_map(|pod| {
        Container::all(pod).map(move |(_, status)| {
            let (uid, id) = (pod.uid().unwrap_or_default(), status.container_id.as_deref().unwrap_or("none"));
            let state = if status.ready { "ready" } else { "not ready" };
            format!(
                "{} {uid}: {} {id}, {state}, restarts: {}",
                pod.name_any(),
                status.name,
                status.restart_count
            )
        })
    });
    let mut identities: Vec<String> = identities.collect();
    identities.sort();
    anyhow::ensure!(!identities.is_empty(), "no pod uses a volume");
    Ok(identities)
}
