//! A claim with another claim as its data source has the source's content. Later writes to one do not change
//! the other. A claim with a data source of another kind gets the volume that a volume populator fills for it.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, TypedLocalObjectReference, TypedObjectReference, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;
use testvm_cluster::waiting::until_event;
use testvm_cluster::workload::until_pod_runs;

use crate::e2e::sabotages::overwrite_files;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{check_text, end, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim, holder};

pub(in crate::e2e) const STORY: Story = Story {
    name: "clones",
    about: "a claim with another claim as its data source, and one that a volume populator fills",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "clone",
        about: "The clone does not have what was written to the original",
        before: "the clone has what was written",
        change: |env| Box::pin(overwrite_files(env)),
        repair: None,
        expected: &["pod clone-filesystem reads \"of another", " instead of \"of the original\""],
    }],
};

/// The size of the claims, which the store rounds up. A clone that requests the same size as its source gets the same capacity.
const DECIMAL_SIZE: &str = "2M";
const EXPANDED: Size = Size::mebibytes(4);
const ORIGINAL: &str = "of the original";
const CHANGED: &str = "no longer shared";

/// The kinds of volumes, and the path of the text in a pod that has the volume at `/vol`.
const KINDS: [(VolumeMode, &str); 2] = [(VolumeMode::Filesystem, "/vol/file"), (VolumeMode::Block, "/vol")];

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    clone_claims(steps, env).await?;
    populate(steps, env).await
}

async fn clone_claims(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    for (mode, file) in KINDS {
        let original = format!("original-{}", mode.as_str().to_lowercase());
        let clone = format!("clone-{}", mode.as_str().to_lowercase());
        steps
            .step(&format!("{mode}: a pod writes to the original"), async {
                create(env, &original, mode, None).await?;
                start(env, &original, &original, mode).await?;
                write(env, &original, file, ORIGINAL).await
            })
            .await?;
        steps
            .step(&format!("{mode}: the clone has what was written"), async {
                create(env, &clone, mode, Some(&original)).await?;
                start(env, &clone, &clone, mode).await?;
                check_text(env, &clone, file, ORIGINAL).await
            })
            .await?;
        steps
            .step(&format!("{mode}: what is written to the clone is its own"), async {
                write(env, &clone, file, CHANGED).await?;
                check_text(env, &clone, file, CHANGED).await?;
                check_text(env, &original, file, ORIGINAL).await
            })
            .await?;
        steps
            .step(&format!("{mode}: the pods end"), async {
                end(env, &original).await?;
                end(env, &clone).await
            })
            .await?;
    }
    Ok(())
}

async fn create(env: &TestEnv<'_>, name: &str, mode: VolumeMode, source: Option<&str>) -> Result<()> {
    let mut object = decimal(env, name, mode)?;
    let source = source.map(|source| TypedLocalObjectReference {
        api_group: None,
        kind: "PersistentVolumeClaim".into(),
        name: source.into(),
    });
    object.spec.get_or_insert_default().data_source = source;
    claims::create(env, &object).await.map(drop)
}

fn decimal(env: &TestEnv<'_>, name: &str, mode: VolumeMode) -> Result<PersistentVolumeClaim> {
    let mut object = claim(name, &env.driver.class_name(), Size::mebibytes(2), mode, "ReadWriteOnce")?;
    let requests = [("storage".to_owned(), Quantity(DECIMAL_SIZE.to_owned()))].into();
    object.spec.get_or_insert_default().resources =
        Some(VolumeResourceRequirements { requests: Some(requests), ..Default::default() });
    Ok(object)
}

const POPULATED: &str = "populated";
const OF_THE_POPULATOR: &str = "of-the-populator";

/// The steps of a volume populator are those of `lib-volume-populator`: it fills the volume of a claim of its own, and binds the
/// PersistentVolume to the claim of the user.
async fn populate(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let mode = VolumeMode::Filesystem;
    let (_, file) = KINDS[0];
    let waits = async {
        let mut object = decimal(env, POPULATED, mode)?;
        object.spec.get_or_insert_default().data_source_ref = Some(TypedObjectReference {
            api_group: Some("example.com".into()),
            kind: "Backup".into(),
            name: "monday".into(),
            namespace: None,
        });
        let object = claims::create(env, &object).await?;
        objects::create(&env.pods(), &holder(POPULATED, POPULATED, mode)?).await?;
        let left = |message: &str| message.contains("populator") && message.contains("Backup");
        until_event(&env.client, &object, &["Provisioning"], env.timeouts.start, left).await.map(drop)
    };
    steps.step("a claim with a data source of another kind waits for its volume populator", waits).await?;
    let handed_over = async {
        let claim = objects::read(&env.claims(), POPULATED).await?;
        let node = claim.annotations().get(claims::SELECTED_NODE).context("no node is selected")?;
        let own = claims::with_selected_node(decimal(env, OF_THE_POPULATOR, mode)?, node);
        claims::create(env, &own).await?;
        start(env, OF_THE_POPULATOR, OF_THE_POPULATOR, mode).await?;
        write(env, OF_THE_POPULATOR, file, ORIGINAL).await?;
        end(env, OF_THE_POPULATOR).await?;
        let volume = claims::volume_of(env, OF_THE_POPULATOR).await?;
        let change = json!({"spec": {"claimRef": {
            "namespace": env.namespace, "name": POPULATED, "uid": claim.uid(), "resourceVersion": claim.resource_version(),
        }}});
        claims::patch_volume(env, &volume.name_any(), &change).await?;
        claims::delete(env, OF_THE_POPULATOR).await
    };
    steps.step("the populator fills a volume and binds it to the claim", handed_over).await?;
    let used = async {
        until_pod_runs(&env.pods(), POPULATED, env.timeouts.start).await?;
        check_text(env, POPULATED, file, ORIGINAL).await?;
        claims::request_size(env, POPULATED, EXPANDED).await?;
        claims::until_expanded(env, POPULATED, EXPANDED).await?;
        end(env, POPULATED).await?;
        claims::delete_with_volume(env, POPULATED).await
    };
    steps.step("its pod reads the content, and the volume is expanded and deleted", used).await
}
