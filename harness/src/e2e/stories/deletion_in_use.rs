//! A claim is forcibly deleted while a pod uses it: the volume stays and reports why, and is deleted after
//! the pod has ended.

use anyhow::Result;
use kube::ResourceExt;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;
use testvm_cluster::waiting::until_event;

use crate::e2e::sabotages::overwrite_files;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{check_text, end, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "deletion-in-use",
    about: "a claim is deleted by force while a pod uses its volume",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "data-in-use",
        about: "The data of a volume in use is lost with its claim",
        before: "the pod still has its data",
        change: |env| Box::pin(overwrite_files(env)),
        repair: None,
        expected: &["pod in-use-filesystem reads \"of another"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
const TEXT: &str = "still here";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    for (mode, file) in [(VolumeMode::Filesystem, "/vol/file"), (VolumeMode::Block, "/vol")] {
        let name = format!("in-use-{}", mode.as_str().to_lowercase());
        let volume = steps
            .step(&format!("{mode}: a pod writes to a claim"), async {
                let object = claim(&name, &env.driver.class_name(), SIZE, mode, "ReadWriteOnce")?;
                claims::create(env, &object).await?;
                start(env, &name, &name, mode).await?;
                write(env, &name, file, TEXT).await?;
                Ok(claims::volume_of(env, &name).await?.name_any())
            })
            .await?;
        steps
            .step(&format!("{mode}: the claim is forced away, and the volume says who uses it"), async {
                force_delete(env, &name).await?;
                let released = claims::released(env, &volume).await?;
                let says = |message: &str| message.contains("use");
                let reasons = ["VolumeFailedDelete"];
                until_event(&env.client, &released, &reasons, env.timeouts.start, says).await.map(drop)
            })
            .await?;
        steps
            .step(&format!("{mode}: the pod still has its data"), check_text(env, &name, file, TEXT))
            .await?;
        steps
            .step(&format!("{mode}: the pod ends, and the volume goes"), async {
                end(env, &name).await?;
                claims::gone(env, &volume).await
            })
            .await?;
    }
    Ok(())
}

/// Deletes the claim, and removes the finalizer that protects it while a pod uses it.
async fn force_delete(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    claims::delete(env, claim).await?;
    let unprotected = json!({"metadata": {"finalizers": null}});
    objects::patch(&env.claims(), claim, &unprotected).await?;
    objects::until_gone(env.claims(), claim, env.timeouts.end).await
}
