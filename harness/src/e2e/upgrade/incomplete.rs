//! Volumes that are incomplete when a version of the driver ends, and that the next version has to finish.
//!
//! An admission policy holds them in that state: it rejects the writes by which the provisioner would finish them.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use testvm_cluster::Node;
use testvm_cluster::waiting::until_none_complains;
use tokio::time::{Instant, sleep};

use crate::test_env::environment::TestEnv;
use crate::test_env::in_use::larger;
use crate::test_env::inventory::Inventory;
use crate::test_env::rejected_writes::{Rejected, allow, reject, was_rejected};
use crate::test_env::sizes::Size;
use crate::test_env::users::User;
use crate::test_env::workload::{VolumeMode, claim};
use crate::test_env::{claims, pods};

const SIZE: Size = Size::mebibytes(1);
const MODES: [VolumeMode; 2] = [VolumeMode::Filesystem, VolumeMode::Block];
/// The poll interval: no event announces that an unneeded volume is deleted.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How far a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The claim is bound, and no pod has used it.
    Unpublished,
    /// The volume is there, and its PersistentVolume is not.
    Created,
    /// The volume has no PersistentVolume, and its claim is deleted before it gets one.
    Abandoned,
    /// The volume has its new size, and its PersistentVolume still says the old one.
    Expanding,
    /// The data is in the trash, and the PersistentVolume still exists.
    Deleting,
}

/// Incomplete volumes of one version: of each state one of each mode.
pub(super) struct IncompleteVolumes {
    version: &'static str,
    /// The inventory of the node before these volumes.
    before: Inventory,
    /// The PersistentVolumes that are being deleted.
    deleting: Vec<String>,
}

impl IncompleteVolumes {
    /// Creates the volumes on the node.
    pub(super) async fn create(
        env: &TestEnv<'_>,
        node: &Node,
        version: &'static str,
    ) -> Result<IncompleteVolumes> {
        let before = Inventory::take(node).await?;
        let mut made = IncompleteVolumes { version, before, deleting: Vec::new() };
        let whole = [State::Unpublished, State::Expanding, State::Deleting];
        try_join_all(whole.into_iter().flat_map(|state| made.claims(state)).map(|it| start(env, node, it)))
            .await?;
        for state in whole {
            made.until_bound(env, state).await?;
        }
        reject(env, Rejected::CreationsAndUpdates).await?;
        made.begin_creations(env, node).await?;
        for (name, _) in made.claims(State::Expanding) {
            claims::request_size(env, &name, larger(SIZE)).await?;
            was_rejected(env, &env.claims().get(&name).await?, "VolumeResizeFailed").await?;
        }
        for (name, _) in made.claims(State::Deleting) {
            let volume = claims::volume_of(env, &name).await?;
            claims::delete(env, &name).await?;
            was_rejected(env, &volume, "VolumeFailedDelete").await?;
            made.deleting.push(volume.name_any());
        }
        Ok(made)
    }

    /// Has the provisioner create volumes whose PersistentVolumes are rejected.
    async fn begin_creations(&self, env: &TestEnv<'_>, node: &Node) -> Result<()> {
        let before = Inventory::take(node).await?;
        let claims: Vec<_> =
            [State::Created, State::Abandoned].into_iter().flat_map(|state| self.claims(state)).collect();
        let count = claims.len();
        for claim in try_join_all(claims.into_iter().map(|it| start(env, node, it))).await? {
            // The provisioner has created the volume before this event.
            was_rejected(env, &claim, "ProvisioningFailed").await?;
        }
        let volumes = Inventory::take(node).await?.volumes_added_since(&before);
        anyhow::ensure!(volumes.len() == count, "of {count} volumes, the node has {volumes:?}");
        Ok(())
    }

    /// Has the API server accept the writes again, after another version of the driver has started.
    pub(super) async fn resume(&self, env: &TestEnv<'_>) -> Result<()> {
        for (name, _) in self.claims(State::Abandoned) {
            claims::delete(env, &name).await?;
        }
        allow(env).await
    }

    /// Checks that the volumes of a state are finished, by the pod that uses them, or that they are deleted.
    pub(super) async fn check(&self, env: &TestEnv<'_>, node: &Node, state: State) -> Result<()> {
        match state {
            State::Unpublished | State::Created => self.check_used(env, state, SIZE).await,
            State::Expanding => {
                for (name, _) in self.claims(state) {
                    claims::until_expanded(env, &name, larger(SIZE)).await?;
                }
                self.check_used(env, state, larger(SIZE)).await
            }
            State::Deleting => {
                for volume in &self.deleting {
                    claims::gone(env, volume).await?;
                }
                Ok(())
            }
            State::Abandoned => self.only_claimed(env, node).await,
        }
    }

    /// Starts a pod with the volumes of a state, and has it write to them.
    async fn check_used(&self, env: &TestEnv<'_>, state: State, size: Size) -> Result<()> {
        self.until_bound(env, state).await?;
        let user = User { name: self.name(state), claims: self.claims(state) };
        pods::create(env, &user.pod()?).await?;
        pods::check_new(env, &user.name, size, &user.volumes()).await
    }

    /// Waits until the node has no volume but those of claims: the provisioner deletes others in the background.
    async fn only_claimed(&self, env: &TestEnv<'_>, node: &Node) -> Result<()> {
        let kept = [State::Unpublished, State::Created, State::Expanding];
        let kept: BTreeSet<String> =
            kept.into_iter().flat_map(|state| self.claims(state)).map(|(name, _)| name).collect();
        let deadline = Instant::now() + env.timeouts.end;
        loop {
            let volumes = Inventory::take(node).await?.volumes_added_since(&self.before);
            if volumes.len() == kept.len() {
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "the claims {kept:?} have the volumes {volumes:?}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Deletes the pods and the claims that are left, and waits until their PersistentVolumes are deleted.
    pub(super) async fn delete(&self, env: &TestEnv<'_>) -> Result<()> {
        for state in [State::Unpublished, State::Created, State::Expanding] {
            pods::end(env, &self.name(state)).await?;
            for (name, _) in self.claims(state) {
                claims::delete_with_volume(env, &name).await?;
            }
        }
        Ok(())
    }

    fn name(&self, state: State) -> String {
        format!("{}-{}", self.version, format!("{state:?}").to_lowercase())
    }

    fn claims(&self, state: State) -> Vec<(String, VolumeMode)> {
        let name = |mode: VolumeMode| format!("{}-{}", self.name(state), mode.as_str().to_lowercase());
        MODES.map(|mode| (name(mode), mode)).into()
    }

    async fn until_bound(&self, env: &TestEnv<'_>, state: State) -> Result<()> {
        let claims = self.claims(state);
        let names: Vec<&str> = claims.iter().map(|(name, _)| name.as_str()).collect();
        let complaint =
            |claim: &PersistentVolumeClaim| (!claims::is_bound(claim)).then(|| "is not bound".into());
        let bound = until_none_complains(env.claims(), "claim", &names, env.timeouts.start, complaint).await;
        bound.with_context(|| format!("volumes that are {state:?}")).map(drop)
    }
}

/// Creates a claim as if the scheduler had chosen the node for its first pod.
async fn start(
    env: &TestEnv<'_>,
    node: &Node,
    (name, mode): (String, VolumeMode),
) -> Result<PersistentVolumeClaim> {
    let object = claim(&name, &env.driver.class_name(), SIZE, mode, "ReadWriteOnce")?;
    claims::create(env, &claims::with_selected_node(object, node.name())).await
}
