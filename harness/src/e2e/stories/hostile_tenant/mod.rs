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
    let other = async { env.in_other_namespace(OTHER) };
    let other = steps.step("read the manifests for the other tenant", other).await?;
    let attacked = attack(steps, env, node, &other).await;
    // After a failure too: the recovery deletes only the namespace of the stories.
    let restored = async {
        removal::delete_namespace(&other).await?;
        foreign_files::restore(env).await
    };
    let restored = steps.step("the other tenant leaves, and csi has its settings", restored).await;
    attacked.and(restored)
}

async fn attack(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node, other: &TestEnv<'_>) -> StepResult {
    let title = "csi searches for foreign files often, and puts them back";
    steps.step(title, foreign_files::search_often(env)).await?;
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
    let title = "the tenant's pods and claims are deleted together, and its volumes go";
    steps.step(title, removal::delete_objects(env)).await?;
    let title = "nothing of the tenant is left on the node";
    steps.step(title, removal::nothing_left(env, node, &tenants.inventory)).await?;
    let title = "the other tenant has its data, its quota and its owners as before";
    let unchanged = async {
        tenants.check_other_data().await?;
        tenants.check_other_state().await
    };
    steps.step(title, unchanged).await
}

/// Makes the files of the other tenant's volume writable for everybody.
async fn open_other_volume(env: &TestEnv<'_>) -> Result<()> {
    let volume = claims::volume_of(&env.in_other_namespace(OTHER)?, OTHER).await?.name_any();
    on_node(env, format!("find DATA/volumes/{volume} -type f -exec chmod 0666 {{}} +")).await
}
