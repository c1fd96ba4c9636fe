//! The limit of a Filesystem volume for a pod that is root on it. In the host's user namespace, a pod can
//! evade the limit. In a user namespace of its own (`hostUsers: false`), it cannot.

use anyhow::Result;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;

use crate::e2e::sabotages::replace_pod;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods;
use crate::test_env::runtime_classes::{self, OWN_USERS, with_user_namespace};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, holder};

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
    steps.step("the RuntimeClass is deleted", runtime_classes::delete(env, OWN_USERS)).await
}

async fn start(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::create(env, OWN_USERS, OWN_USERS).await?;
    for name in [HOST, OWN] {
        claims::request(env, name, SIZE, VolumeMode::Filesystem).await?;
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
