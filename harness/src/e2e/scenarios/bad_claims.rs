//! Claims that cannot be provisioned: each gets an event with the reason, and none leaves anything behind.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::until_event;

use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim, holder};

pub(in crate::e2e) const NAME: &str = "bad claims";

/// A size that exceeds every node's file system.
const TOO_LARGE: Size = Size::mebibytes(1 << 30);
const ORDINARY: Size = Size::mebibytes(1);
/// The component that rejects a claim: the provisioner, or the scheduler of the claim's pod.
#[derive(Clone, Copy)]
enum Refusal {
    ProvisioningFailed,
    FailedScheduling,
}

pub(in crate::e2e) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>) -> StepResult {
    let before = match env.node {
        Some(node) => Some(scenario.step("look at the node", Inventory::take(node)).await?),
        None => None,
    };
    let class = env.driver.class_name();
    for mode in ["Filesystem", "Block"] {
        let name = format!("too-large-{}", mode.to_lowercase());
        // No node publishes enough capacity, so the scheduler selects none.
        let by = (Refusal::FailedScheduling, "enough free storage");
        let refused = refused(env, &name, &class, TOO_LARGE, mode, "ReadWriteOnce", by);
        scenario.step(&format!("a {mode} claim larger than the file system"), refused).await?;
    }
    let refused_mode =
        refused(env, "shared", &class, ORDINARY, "Filesystem", "ReadWriteMany", provisioner("ReadWriteMany"));
    scenario.step("an access mode that a local volume cannot have", refused_mode).await?;
    scenario.step("an unknown parameter of the StorageClass", unknown_parameter(env)).await?;
    scenario.step("a size of zero is refused by the API server itself", zero(env)).await?;
    match (env.node, before) {
        (Some(node), Some(before)) => {
            scenario
                .step("nothing was left on the node", async {
                    let more = Inventory::take(node).await?.beyond(&before);
                    anyhow::ensure!(more.is_empty(), "left behind: {}", more.join("; "));
                    Ok(())
                })
                .await
        }
        _ => {
            scenario.skip("nothing was left on the node", FOREIGN_NODE);
            Ok(())
        }
    }
}

fn provisioner(word: &str) -> (Refusal, &str) {
    (Refusal::ProvisioningFailed, word)
}

/// Creates a claim and a pod that uses it, and checks that an event has the reason of the rejection.
async fn refused(
    env: &TestEnv<'_>,
    name: &str,
    class: &str,
    size: Size,
    mode: &str,
    access: &str,
    (by, word): (Refusal, &str),
) -> Result<()> {
    let object = claim(name, class, size, mode, access)?;
    let object = env
        .claims()
        .create(&PostParams::default(), &object)
        .await
        .map_err(api_error)
        .context("create the claim")?;
    let r#use = if mode == "Block" { Use::Device } else { Use::Mounted };
    let pod = holder(name, name, r#use, false)?;
    let pod =
        env.pods().create(&PostParams::default(), &pod).await.map_err(api_error).context("create the pod")?;

    let says = |message: &str| message.contains(word);
    let event = match by {
        Refusal::ProvisioningFailed => {
            until_event(&env.client, &object, &["ProvisioningFailed"], env.timeouts.start, says).await
        }
        Refusal::FailedScheduling => {
            until_event(&env.client, &pod, &["FailedScheduling"], env.timeouts.start, says).await
        }
    };
    event.with_context(|| format!("expected an event that says {word:?}"))?;
    let pod: Pod = env.pods().get(name).await?;
    let phase = pod.status.and_then(|status| status.phase);
    anyhow::ensure!(phase.as_deref() == Some("Pending"), "the pod is {phase:?}, not Pending");
    let volumes: Api<PersistentVolume> = Api::all(env.client.clone());
    let made = volumes.list(&ListParams::default()).await?.into_iter().find(|volume| {
        let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        claim.is_some_and(|claim| claim.uid == object.metadata.uid)
    });
    anyhow::ensure!(made.is_none(), "a volume was made for it: {:?}", made.map(|volume| volume.name_any()));

    env.pods()
        .delete(name, &DeleteParams::default().grace_period(0))
        .await
        .map_err(api_error)
        .context("delete the pod")?;
    env.claims()
        .delete(name, &DeleteParams::default())
        .await
        .map_err(api_error)
        .context("delete the claim")?;
    Ok(())
}

async fn unknown_parameter(env: &TestEnv<'_>) -> Result<()> {
    let mut class: StorageClass = env.driver.class.clone();
    class.metadata =
        kube::core::ObjectMeta { name: Some(format!("{}-colour", env.namespace)), ..Default::default() };
    class.parameters.get_or_insert_default().insert("colour".into(), "blue".into());
    let classes: Api<StorageClass> = Api::all(env.client.clone());
    let name = class.name_any();
    classes
        .create(&PostParams::default(), &class)
        .await
        .map_err(api_error)
        .context("create the StorageClass")?;
    let refused = refused(
        env,
        "unknown-parameter",
        &name,
        ORDINARY,
        "Filesystem",
        "ReadWriteOnce",
        provisioner("colour"),
    )
    .await;
    // The class is deleted also if the case failed: it is not in the namespace that is deleted at the end.
    classes
        .delete(&name, &DeleteParams::default())
        .await
        .map_err(api_error)
        .context("delete the StorageClass")?;
    refused
}

async fn zero(env: &TestEnv<'_>) -> Result<()> {
    let object = claim("zero", &env.driver.class_name(), Size::mebibytes(0), "Filesystem", "ReadWriteOnce")?;
    match env.claims().create(&PostParams::default(), &object).await {
        Err(kube::Error::Api(status))
            if status.code == 422 && status.message.contains("greater than zero") =>
        {
            Ok(())
        }
        Err(error) => Err(error).context("not the refusal expected"),
        Ok(_) => anyhow::bail!("the API server took a claim of zero bytes"),
    }
}
