//! The chart installs the driver while pods use volumes: first over the objects of the manifests, then on a cluster without them.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt};
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, objects};

use super::removal;
use crate::e2e::doctor;
use crate::e2e::parts::serving;
use crate::e2e::sabotages::reject_writes;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::helm::{Helm, RELEASE, is_kept};
use crate::test_env::disturbances::replace_pods;
use crate::test_env::environment::TestEnv;
use crate::test_env::in_use::{InUse, running};
use crate::test_env::rejected_writes::Rejected;

pub(in crate::e2e) const STORY: Story = Story {
    name: "helm",
    about: "the chart installs the driver, over the manifests and without them, while volumes are in use",
    when: When::Long,
    run: Run::OwnNode(|steps, state, cluster, _| Box::pin(run(steps, state.env, cluster))),
    sabotages: &[Sabotage {
        name: "chart",
        about: "The API server rejects the expansion of volumes after the chart was installed",
        before: "the volumes are expanded in use",
        change: |env| Box::pin(reject_writes(env, Rejected::CreationsAndUpdates)),
        repair: None,
        expected: &["claim helm-filesystem is not given 2Mi"],
    }],
};

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, cluster: &Cluster) -> StepResult {
    let helm = Helm::build(steps.session());
    let helm = steps.step("build Helm", helm).await?;
    let (kubeconfig, values) = (cluster.kubeconfig(), json!({}));
    let mut in_use = InUse::of("helm");
    steps.step("pods use a directory and a block volume", in_use.create(env)).await?;
    let containers = steps.step("list the containers of all pods with volumes", running(env)).await?;
    let driver = steps.step("list the pods of the driver", uids(env)).await?;
    let taken = async {
        helm.take_ownership(&kubeconfig, &values).await?;
        serving::served(env).await?;
        check_uids(env, &driver).await
    };
    steps.step("helm install --take-ownership replaces no pod of the driver", taken).await?;
    // The administrator takes over the namespace, which has an object of a user.
    let note =
        steps.step("a user creates an object in the namespace of the driver", Note::create(env)).await?;
    let left = async {
        helm.install(&kubeconfig, RELEASE, &json!({"namespace": {"create": false}})).await?;
        note.check(env).await?;
        check_uids(env, &driver).await?;
        helm.install(&kubeconfig, RELEASE, &values).await?;
        note.check(env).await
    };
    steps.step("an upgrade with namespace.create=false keeps the namespace and all in it", left).await?;
    steps.step("the volumes are expanded in use", in_use.expand(env)).await?;
    let uninstalled = async {
        replace_pods(env).await?;
        helm.uninstall(&kubeconfig, RELEASE).await?;
        let existing = env.manifests.existing(&env.client).await?;
        let (kept, existing): (Vec<_>, Vec<_>) = existing.into_iter().partition(|object| is_kept(object));
        anyhow::ensure!(existing.is_empty(), "these objects exist: {existing:?}");
        anyhow::ensure!(kept.len() == 2, "of the namespace and the CSIDriver, only these exist: {kept:?}");
        Ok(())
    };
    let what = "helm uninstall deletes all objects of the driver but the namespace and the CSIDriver";
    steps.step(what, uninstalled).await?;
    steps.step("the object of the user still exists", note.check(env)).await?;
    steps.step("without the driver, the pods have their volumes", in_use.check(env)).await?;
    let installed = async {
        helm.install(&kubeconfig, RELEASE, &values).await?;
        serving::served(env).await
    };
    steps.step("helm install: the pods are ready, and the node offers the driver", installed).await?;
    steps.step("loopfs doctor finds nothing missing", doctor::in_containers(env)).await?;
    steps.step("the volumes are expanded once more", in_use.expand(env)).await?;
    let unchanged = async {
        let now = running(env).await?;
        anyhow::ensure!(now == containers, "the containers were {containers:?} and are {now:?}");
        Ok(())
    };
    steps.step("no container of a pod with volumes was restarted", unchanged).await?;
    let another = InUse::of("helm-next");
    let replaced = async {
        another.create(env).await?;
        removal::delete_objects(env).await
    };
    steps.step("claims are provisioned, and deleted with their volumes", replaced).await?;
    let with_manifests = async {
        replace_pods(env).await?;
        helm.uninstall(&kubeconfig, RELEASE).await?;
        note.check(env).await?;
        objects::delete(&config_maps(env), Note::NAME).await?;
        env.manifests.apply(&env.client).await?;
        serving::served(env).await
    };
    steps.step("helm uninstall, and the manifests install the driver again", with_manifests).await
}

/// An object of a user in the namespace of the driver.
struct Note {
    uid: Option<String>,
}

impl Note {
    const NAME: &str = "note-of-a-user";

    async fn create(env: &TestEnv<'_>) -> Result<Note> {
        let object: ConfigMap = serde_json::from_value(json!({"metadata": {"name": Note::NAME}}))?;
        let created = objects::create(&config_maps(env), &object).await?;
        Ok(Note { uid: created.uid() })
    }

    async fn check(&self, env: &TestEnv<'_>) -> Result<()> {
        let object = objects::read(&config_maps(env), Note::NAME).await?;
        anyhow::ensure!(object.uid() == self.uid, "the object of the user was replaced");
        Ok(())
    }
}

fn config_maps(env: &TestEnv<'_>) -> Api<ConfigMap> {
    Api::namespaced(env.client.clone(), env.driver.namespace())
}

/// Returns the UIDs of the driver's pods.
async fn uids(env: &TestEnv<'_>) -> Result<Vec<String>> {
    let pods = env.live_driver_pods().await?;
    pods.iter().map(|pod| pod.uid().context("a pod of the driver has no UID")).collect()
}

/// Checks that the pods of the driver are those that they were.
async fn check_uids(env: &TestEnv<'_>, before: &[String]) -> Result<()> {
    let now = uids(env).await?;
    anyhow::ensure!(now == before, "the pods of the driver were {before:?} and are {now:?}");
    Ok(())
}
