//! A tenant who attacks the node and another tenant by the content of volumes: names, symbolic links, project ids, special
//! files. At the end its volumes are gone, and the other tenant's volume is what it was.

mod foreign_files;
mod kubelet;
mod sub_paths;
mod tenants;

use anyhow::Result;
use kube::ResourceExt;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::Node;

use self::foreign_files::Settings;
use self::tenants::{OTHER, move_in};
use super::removal;
use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;

pub(in crate::e2e) const STORY: Story = Story {
    name: "hostile-tenant",
    about: "a tenant attacks the node and another tenant by names, links, project ids and special files",
    when: When::All,
    run: Run::OwnNode(|steps, state, _, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "other-tenant",
        about: "The files of the other tenant can be written by everybody",
        before: "csi puts the files back, and the provisioner reports both volumes",
        change: |env| Box::pin(open_other_volume(env)),
        repair: None,
        expected: &["the other tenant's volume was", "666"],
    }],
};

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let prepared = async { Ok((env.in_other_namespace(OTHER)?, Settings::read(env).await?)) };
    let (other, settings) = steps.step("read the settings of csi", prepared).await?;
    let attacked = attack(steps, env, node, &other, &settings).await;
    // After a failure too: the recovery deletes only the namespace of the stories.
    let restored = async {
        removal::delete_namespace(&other).await?;
        removal::no_volumes(&other).await?;
        settings.restore(env).await
    };
    let restored = steps.step("the other tenant leaves, and csi has its settings", restored).await;
    attacked.and(restored)
}

async fn attack(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    other: &TestEnv<'_>,
    settings: &Settings,
) -> StepResult {
    let title = "csi searches for foreign files often, and puts them back";
    steps.step(title, settings.search_often(env)).await?;
    let tenants =
        steps.step("the other tenant's pod writes to its volume", move_in(env, node, other)).await?;
    let title = "a tenant fills its volumes with links, names, special files and a deep tree";
    steps.step(title, tenants.plant()).await?;
    foreign_files::run(steps, &tenants).await?;
    // Before the kubelet restarts: afterwards it fails to set the group of a path longer than PATH_MAX in the tenant's volume, and
    // repeats that before it looks at another pod with the volume.
    let title = "ReadWriteOncePod: the kubelet starts no second pod with the volume";
    steps.step(title, tenants.second_pod()).await?;
    kubelet::run(steps, &tenants).await?;
    sub_paths::run(steps, &tenants).await?;
    steps
        .step("the tenant's pods and claims are deleted together, and its volumes go", tenants.evict())
        .await?;
    let title = "nothing of the tenant is left on the node";
    steps.step(title, removal::nothing_left(env, node, &tenants.inventory)).await?;
    let title = "the other tenant has its data, its quota and its owners as before";
    steps.step(title, tenants.check_other()).await
}

/// Makes the files of the other tenant's volume writable for everybody.
async fn open_other_volume(env: &TestEnv<'_>) -> Result<()> {
    let volume = claims::volume_of(&env.in_other_namespace(OTHER)?, OTHER).await?.name_any();
    on_node(env, format!("find DATA/volumes/{volume} -type f -exec chmod 0666 {{}} +")).await
}
