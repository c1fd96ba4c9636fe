//! The limit of a Filesystem volume for a pod that is root on it. In the host's user namespace, a pod can
//! evade the limit. In a user namespace of its own (`hostUsers: false`), it cannot.

use anyhow::{Context, Result};
use kube::ResourceExt;
use kube::api::PostParams;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::{State, until_logged};

use crate::e2e::sabotages::replace_pod;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, end};
use crate::test_env::runtime_classes::{self, OWN_USERS, with_user_namespace};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim, holder};

pub(in crate::e2e) const STORY: Story = Story {
    name: "user-namespaces",
    about: "the limit of a volume, with and without a user namespace of the pod",
    when: When::All,
    run: Run::OwnNode(|steps, state, _, _| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "host-users",
        about: "The pod has no user namespace",
        before: "the pod is root of a namespace of its own, and writes",
        change: |env| {
            Box::pin(replace_pod(env, OWN, |pod| {
                pod.host_users = None;
                pod.runtime_class_name = None;
            }))
        },
        repair: None,
        expected: &["the pod's ids are mapped as"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
/// The names of pods and their claims.
const HOST: &str = "host-users";
const OWN: &str = "own-users";
/// The host's user namespace maps all ids to themselves.
const IDENTITY: [&str; 3] = ["0", "0", "4294967295"];

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    steps.step("pods with and without a user namespace start with a volume", start(env)).await?;
    steps.step("hostUsers: true: the pod changes the project id of its volume", changes(env)).await?;
    steps
        .step("hostUsers: false: the pod is root of a namespace of its own, and writes", writes(env))
        .await?;
    let changed = pods::cannot_change_project(env, OWN, "/vol", "EINVAL");
    steps.step("hostUsers: false: the project id cannot be changed: EINVAL", changed).await?;
    steps.step("hostUsers: false: a pod with volumeDevices is refused", refused(env)).await?;
    steps
        .step("the driver reports the volume whose project id was changed, and no other", reported(env))
        .await?;
    steps.step("pods and claims go", clear(env)).await
}

async fn start(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::create(env, OWN_USERS, OWN_USERS).await?;
    for name in [HOST, OWN] {
        let claim = claim(name, &env.driver.class_name(), SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
        claims::create(env, &claim).await?;
    }
    let host = holder(HOST, HOST, VolumeMode::Filesystem)?;
    let own = with_user_namespace(holder(OWN, OWN, VolumeMode::Filesystem)?);
    tokio::try_join!(pods::create(env, &host), pods::create(env, &own)).map(drop)
}

async fn changes(env: &TestEnv<'_>) -> Result<()> {
    let said = pods::change_project(env, HOST, "/vol").await?;
    anyhow::ensure!(said.succeeded, "the project id could not be changed: {}{}", said.stdout, said.stderr);
    Ok(())
}

async fn writes(env: &TestEnv<'_>) -> Result<()> {
    let map = exec_ok(&env.pods(), OWN, &["/volume-check", "read", "/proc/self/uid_map"]).await?;
    let map: Vec<&str> = map.split_whitespace().collect();
    anyhow::ensure!(map.first() == Some(&"0") && map != IDENTITY, "the pod's ids are mapped as {map:?}");
    pods::write(env, OWN, "/vol/file", "by root of the pod").await?;
    pods::check_text(env, OWN, "/vol/file", "by root of the pod").await
}

async fn refused(env: &TestEnv<'_>) -> Result<()> {
    let pod = with_user_namespace(holder("block-own-users", OWN, VolumeMode::Block)?);
    match env.pods().create(&PostParams::default(), &pod).await {
        Err(kube::Error::Api(status)) if status.code == 422 => {
            anyhow::ensure!(status.message.contains("volumeDevices: Forbidden"), "{}", status.message);
            Ok(())
        }
        Err(error) => Err(api_error(error)).context("create a pod with hostUsers: false and volumeDevices"),
        Ok(_) => anyhow::bail!("the API server accepts hostUsers: false together with volumeDevices"),
    }
}

/// Checks that the driver has logged what its check found exactly once.
async fn reported(env: &TestEnv<'_>) -> Result<()> {
    let changed = claims::volume_of(env, HOST).await?.name_any();
    let unchanged = claims::volume_of(env, OWN).await?.name_any();
    let pods = env.live_driver_pods().await?;
    let pod = pods.first().context("the driver has no pod")?.name_any();
    until_logged(&env.driver_pods(), &pod, Some("csi"), env.timeouts.start, |line| {
        let abnormal = line.contains("ProjectChanged");
        if abnormal && line.contains(&unchanged) {
            return State::Failed(format!("the volume of {OWN} is reported: {line}"));
        }
        State::ready_if(abnormal && line.contains(&changed), format!("nothing is logged of volume {changed}"))
    })
    .await
}

async fn clear(env: &TestEnv<'_>) -> Result<()> {
    tokio::try_join!(end(env, HOST), end(env, OWN))?;
    for claim in [HOST, OWN] {
        claims::delete_with_volume(env, claim).await?;
    }
    runtime_classes::delete(env, OWN_USERS).await
}
