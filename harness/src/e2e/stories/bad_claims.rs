//! Claims that cannot be provisioned. For each there is an event with the reason, its pod stays Pending, and nothing is
//! left on the node.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use testvm::excerpt::list;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::containers::{Container, freeze};
use testvm_cluster::objects;
use testvm_cluster::waiting::until_event;

use crate::e2e::sabotages::{add_volume, remove_volume};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim, holder};

pub(in crate::e2e) const STORY: Story = Story {
    name: "bad-claims",
    about: "claims that cannot be provisioned get an event with the reason",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[
        Sabotage {
            name: "silence",
            about: "The driver is frozen, and reports nothing of a claim",
            before: "an access mode of several nodes is rejected",
            change: |env| Box::pin(freeze_driver(env)),
            repair: None,
            expected: &["expected an event that contains", "ReadWriteMany"],
        },
        Sabotage {
            name: "left-behind",
            about: "A rejected claim leaves a volume",
            before: "nothing is left on the node",
            change: |env| Box::pin(add_volume(env)),
            repair: Some(|env| Box::pin(remove_volume(env))),
            expected: &["left behind", "pvc-00000000"],
        },
    ],
};

/// A size that exceeds every node's file system.
const TOO_LARGE: Size = Size::mebibytes(1 << 30);
/// A size that every node can provision.
const SMALL: Size = Size::mebibytes(1);
/// A parameter of a StorageClass that the provisioner does not know.
const UNKNOWN: &str = "colour";

/// A claim that must not be provisioned.
struct BadClaim<'a> {
    name: &'a str,
    class: &'a str,
    size: Size,
    mode: VolumeMode,
    access_mode: &'a str,
    rejected_by: Component,
    /// A part of the event's message.
    message: &'a str,
}

#[derive(Clone, Copy)]
enum Component {
    /// Records an event about the claim.
    Provisioner,
    /// Records an event about the claim's pod.
    Scheduler,
}

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let before = match env.node {
        Some(node) => Some((node, steps.step("list what is on the node", Inventory::take(node)).await?)),
        None => None,
    };
    let class = env.driver.class_name();
    for mode in [VolumeMode::Filesystem, VolumeMode::Block] {
        let too_large = BadClaim {
            name: &format!("too-large-{}", mode.as_str().to_lowercase()),
            class: &class,
            size: TOO_LARGE,
            mode,
            access_mode: "ReadWriteOnce",
            // No node publishes enough capacity.
            rejected_by: Component::Scheduler,
            message: "enough free storage",
        };
        let title = format!("a {mode} claim larger than the file system is rejected");
        steps.step(&title, check_rejection(env, &too_large)).await?;
    }
    let shared = BadClaim {
        name: "shared",
        class: &class,
        size: SMALL,
        mode: VolumeMode::Filesystem,
        access_mode: "ReadWriteMany",
        rejected_by: Component::Provisioner,
        message: "ReadWriteMany",
    };
    steps.step("an access mode of several nodes is rejected", check_rejection(env, &shared)).await?;
    steps.step("an unknown parameter of the StorageClass is rejected", check_unknown_parameter(env)).await?;
    steps.step("a size of zero is rejected by the API server itself", check_zero_size(env)).await?;
    let title = "nothing is left on the node";
    let Some((node, before)) = before else {
        steps.skip(title, FOREIGN_NODE);
        return Ok(());
    };
    steps
        .step(title, async {
            let left = Inventory::take(node).await?.added_since(&before);
            anyhow::ensure!(left.is_empty(), "left behind {}", list(&left));
            Ok(())
        })
        .await
}

/// Creates the claim and a pod that uses it, checks that it is rejected, and deletes both.
///
/// If the check fails, the two are deleted with their namespace at the end of the run.
async fn check_rejection(env: &TestEnv<'_>, bad: &BadClaim<'_>) -> Result<()> {
    let claim = claim(bad.name, bad.class, bad.size, bad.mode, bad.access_mode)?;
    let claim = claims::create(env, &claim).await?;
    let pod = holder(bad.name, bad.name, bad.mode)?;
    let pod = objects::create(&env.pods(), &pod).await?;

    until_rejected(env, bad, &claim, &pod).await?;
    check_not_provisioned(env, &claim, &pod).await?;

    env.pods()
        .delete(bad.name, &DeleteParams::default().grace_period(0))
        .await
        .map_err(api_error)
        .context("delete the pod")?;
    claims::delete(env, bad.name).await
}

/// Waits for the event with the reason of the rejection.
async fn until_rejected(
    env: &TestEnv<'_>,
    bad: &BadClaim<'_>,
    claim: &PersistentVolumeClaim,
    pod: &Pod,
) -> Result<()> {
    let expected = |message: &str| message.contains(bad.message);
    let event = match bad.rejected_by {
        Component::Provisioner => {
            until_event(&env.client, claim, &["ProvisioningFailed"], env.timeouts.start, expected).await
        }
        Component::Scheduler => {
            until_event(&env.client, pod, &["FailedScheduling"], env.timeouts.start, expected).await
        }
    };
    event.with_context(|| format!("expected an event that contains {:?}", bad.message)).map(drop)
}

async fn check_not_provisioned(env: &TestEnv<'_>, claim: &PersistentVolumeClaim, pod: &Pod) -> Result<()> {
    let pod = env.pods().get(&pod.name_any()).await?;
    let phase = pod.status.and_then(|status| status.phase);
    anyhow::ensure!(phase.as_deref() == Some("Pending"), "the pod is {phase:?}, not Pending");
    let volumes = claims::volumes(env).list(&ListParams::default()).await?;
    let created = volumes.iter().find(|volume| {
        let claim_ref = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        claim_ref.is_some_and(|claim_ref| claim_ref.uid == claim.metadata.uid)
    });
    let created = created.map(|volume| volume.name_any());
    anyhow::ensure!(created.is_none(), "a volume was created for claim {}: {created:?}", claim.name_any());
    Ok(())
}

async fn check_unknown_parameter(env: &TestEnv<'_>) -> Result<()> {
    let mut class: StorageClass = env.driver.class.clone();
    let name = format!("{}-{UNKNOWN}", env.namespace);
    class.metadata = kube::core::ObjectMeta { name: Some(name.clone()), ..Default::default() };
    class.parameters.get_or_insert_default().insert(UNKNOWN.into(), "blue".into());
    let classes: Api<StorageClass> = Api::all(env.client.clone());
    objects::create(&classes, &class).await?;
    let bad = BadClaim {
        name: "unknown-parameter",
        class: &name,
        size: SMALL,
        mode: VolumeMode::Filesystem,
        access_mode: "ReadWriteOnce",
        rejected_by: Component::Provisioner,
        message: UNKNOWN,
    };
    let rejection = check_rejection(env, &bad).await;
    // Also after a failure, because a StorageClass is not deleted with the namespace of the test.
    objects::delete(&classes, &name).await?;
    rejection
}

async fn check_zero_size(env: &TestEnv<'_>) -> Result<()> {
    let class = env.driver.class_name();
    let zero = claim("zero", &class, Size::mebibytes(0), VolumeMode::Filesystem, "ReadWriteOnce")?;
    match env.claims().create(&PostParams::default(), &zero).await {
        Err(kube::Error::Api(status))
            if status.code == 422 && status.message.contains("greater than zero") =>
        {
            Ok(())
        }
        Err(error) => {
            Err(error).context("the API server rejected the claim for another reason than its size")
        }
        Ok(_) => anyhow::bail!("the API server accepted a claim of zero bytes"),
    }
}

/// Freezes the driver, so that no event announces anything any more.
async fn freeze_driver(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    for pod in env.live_driver_pods().await? {
        for container in env.driver.containers() {
            freeze(node, &Container::of(&pod, container)?).await?;
        }
    }
    env.timeouts.shorten();
    Ok(())
}
