//! A claim with another claim as its data source has the source's content. Later writes to one do not change
//! the other.

use anyhow::Result;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use testvm::steps::{StepResult, Steps};

use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, reads, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const NAME: &str = "clones";

const SIZE: Size = Size::mebibytes(2);
const ORIGINAL: &str = "of the original";
const CHANGED: &str = "no longer shared";

/// The kinds of volumes, and the path of the text in a pod that has the volume at `/vol`.
const KINDS: [(VolumeMode, &str); 2] = [(VolumeMode::Filesystem, "/vol/file"), (VolumeMode::Block, "/vol")];

pub(in crate::e2e) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    for (mode, file) in KINDS {
        let original = format!("original-{}", mode.as_str().to_lowercase());
        let clone = format!("clone-{}", mode.as_str().to_lowercase());
        steps
            .step(&format!("{mode}: a pod writes to the original"), async {
                create(env, &original, mode, None).await?;
                start(env, &original, &original, mode).await?;
                write(env, &original, mode, file, ORIGINAL).await
            })
            .await?;
        steps
            .step(&format!("{mode}: the clone has what was written"), async {
                create(env, &clone, mode, Some(&original)).await?;
                start(env, &clone, &clone, mode).await?;
                reads(env, &clone, file, ORIGINAL).await
            })
            .await?;
        steps
            .step(&format!("{mode}: what is written to the clone is its own"), async {
                write(env, &clone, mode, file, CHANGED).await?;
                reads(env, &clone, file, CHANGED).await?;
                reads(env, &original, file, ORIGINAL).await
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
    let mut object = claim(name, &env.driver.class_name(), SIZE, mode, "ReadWriteOnce")?;
    let source = source.map(|source| TypedLocalObjectReference {
        api_group: None,
        kind: "PersistentVolumeClaim".into(),
        name: source.into(),
    });
    object.spec.get_or_insert_default().data_source = source;
    claims::create(env, &object).await.map(drop)
}
