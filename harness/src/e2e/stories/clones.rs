//! Claims with other claims as their data sources have the sources' content. Later writes to one do not change the other. Then the
//! clones are deleted by force while a pod uses them: the volumes stay and report why, and are deleted after the pod has ended.

use anyhow::Result;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;
use testvm_cluster::waiting::until_event;

use crate::e2e::parts::both_modes::{self, FILES, claims_of};
use crate::e2e::sabotages::overwrite_files;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::end;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{claim, name_of};

pub(in crate::e2e) const STORY: Story = Story {
    name: "clones",
    about: "claims with other claims as their data sources; the clones are deleted by force while a pod uses them",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "clone",
        about: "The clone does not have what was written to the original",
        before: "the clones have what was written",
        change: |env| Box::pin(overwrite_files(env)),
        repair: None,
        expected: &["pod clone reads \"of another", " instead of \"of the original\""],
    }],
};

/// The size of the claims, which the store rounds up. A clone that requests the same size as its source gets the same capacity.
const DECIMAL_SIZE: &str = "2M";
const ORIGINAL: &str = "original";
const CLONE: &str = "clone";
const TEXT: &str = "of the original";
const CHANGED: &str = "no longer shared";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let written = async {
        create_claims(env, ORIGINAL, None).await?;
        both_modes::start(env, ORIGINAL, ORIGINAL, false).await?;
        both_modes::write(env, ORIGINAL, TEXT).await
    };
    steps.step("a pod writes to the originals, a mounted and a block volume", written).await?;
    let cloned = async {
        create_claims(env, CLONE, Some(ORIGINAL)).await?;
        both_modes::start(env, CLONE, CLONE, false).await?;
        both_modes::check_text(env, CLONE, TEXT).await
    };
    steps.step("the clones have what was written", cloned).await?;
    let separate = async {
        both_modes::write(env, CLONE, CHANGED).await?;
        both_modes::check_text(env, CLONE, CHANGED).await?;
        both_modes::check_text(env, ORIGINAL, TEXT).await
    };
    steps.step("what is written to the clones is their own", separate).await?;
    let title = "the claims of the clones are deleted by force, and the volumes report that a pod uses them";
    let volumes = steps.step(title, delete_in_use(env)).await?;
    steps.step("the pod still has its data", both_modes::check_text(env, CLONE, CHANGED)).await?;
    let deleted = async {
        end(env, CLONE).await?;
        for volume in &volumes {
            claims::gone(env, volume).await?;
        }
        Ok(())
    };
    steps.step("the pod ends, and the volumes are deleted", deleted).await
}

async fn create_claims(env: &TestEnv<'_>, name: &str, source: Option<&str>) -> Result<()> {
    for (mode, _) in FILES {
        let class = env.driver.class_name();
        let mut object = claim(&name_of(name, mode), &class, Size::mebibytes(2), mode, "ReadWriteOnce")?;
        let spec = object.spec.get_or_insert_default();
        let requests = spec.resources.get_or_insert_default().requests.get_or_insert_default();
        requests.insert("storage".into(), Quantity(DECIMAL_SIZE.into()));
        spec.data_source = source.map(|source| TypedLocalObjectReference {
            api_group: None,
            kind: "PersistentVolumeClaim".into(),
            name: name_of(source, mode),
        });
        claims::create(env, &object).await?;
    }
    Ok(())
}

/// Deletes the claims of the clones, removes the finalizers that protect them while a pod uses them, and returns the names of their
/// volumes.
async fn delete_in_use(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let mut volumes = Vec::new();
    for claim in claims_of(CLONE) {
        let volume = claims::volume_of(env, &claim).await?.name_any();
        claims::delete(env, &claim).await?;
        objects::patch(&env.claims(), &claim, &json!({"metadata": {"finalizers": null}})).await?;
        objects::until_gone(env.claims(), &claim, env.timeouts.end).await?;
        let released = claims::released(env, &volume).await?;
        let reports_use = |message: &str| message.contains("in use");
        let reasons = ["VolumeFailedDelete"];
        until_event(&env.client, &released, &reasons, env.timeouts.start, reports_use).await?;
        volumes.push(volume);
    }
    Ok(volumes)
}
