//! An attacker who controls the provisioner's container tries to reach the volumes and the node. The program of the attack runs with
//! the user, the capabilities, the namespaces and the filter of system calls of that container.

use anyhow::{Context, Result};
use kube::ResourceExt;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::containers::{self, Container};
use testvm_cluster::exec::exec_in;
use testvm_cluster::{KUBELET_ROOT, Node};

use crate::e2e::parts::serving::change_container;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::nodes::DATA_DIR;
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;
use crate::test_env::workload::VolumeMode;
use crate::test_env::{claims, pods};

pub(in crate::e2e) const STORY: Story = Story {
    name: "hostile-provisioner",
    about: "an attacker in the provisioner's container reaches neither the volumes nor the node",
    when: When::All,
    run: Run::OwnNode(|steps, state, _, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "privileges",
        about: "A program in the provisioner's container can get the user of its file",
        before: "each attack fails in the provisioner's container",
        change: |env| Box::pin(allow_privileges(env)),
        repair: None,
        expected: &["an attacker in the container provisioner can run a program as root"],
    }],
};

/// The tenant's pod and its claim.
const TENANT: &str = "tenant";
const SIZE: Size = Size::mebibytes(1);
const PROVISIONER: &str = "provisioner";
/// Where the files of the attack are, on the node and in the container, and the program among them.
const DIRECTORY: &str = "/attacker";
const PROGRAM: &str = "/attacker/program";
/// Puts the files of the attack into the directory `$1`: the program, a copy of it with the set-user-ID bit of root, and a file that
/// only root may read. Every user may create files there.
const PLACE: &str = "rm -rf \"$1\"
install -d -m 0777 \"$1\"
install -m 0755 \"$2\" \"$1/program\"
install -m 4755 \"$2\" \"$1/as-root\"
install -m 0600 /dev/null \"$1/secret\"";

/// What is attacked, and with which program.
struct Attack<'a> {
    env: &'a TestEnv<'a>,
    node: &'a Node,
    /// The program on the node: that of the tenant's pod.
    program: String,
    /// The directory of the tenant's volume.
    volume: String,
    /// The socket on the node that serves the Node service.
    node_socket: String,
}

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let attack = steps.step("a tenant's pod has a volume", Attack::prepare(env, node)).await?;
    // Otherwise an attack that cannot succeed anywhere would pass.
    steps.step("root on the node succeeds with each attack", attack.as_root()).await?;
    steps.step("each attack fails in the provisioner's container", attack.as_provisioner()).await
}

impl<'a> Attack<'a> {
    async fn prepare(env: &'a TestEnv<'a>, node: &'a Node) -> Result<Attack<'a>> {
        pods::start_new(env, TENANT, SIZE, VolumeMode::Filesystem).await?;
        let pod = env.pods().get(TENANT).await?;
        let process = containers::process(node, &Container::of(&pod, "volume-check")?).await?;
        Ok(Attack {
            env,
            node,
            program: [process.as_str(), "root", "volume-check"].join("/"),
            volume: format!("{DATA_DIR}/volumes/{}", claims::volume_of(env, TENANT).await?.name_any()),
            node_socket: format!("{KUBELET_ROOT}/plugins/{}/csi.sock", env.driver.name),
        })
    }

    /// Checks that each attack succeeds for root on the node, in a mount namespace for the mounts of the attack.
    async fn as_root(&self) -> Result<()> {
        self.place("").await?;
        let argv = [&["unshare", "--mount"], self.argv().as_slice()].concat();
        let outcomes = self.node.output(&argv).await;
        self.remove("").await?;
        let outcomes = outcomes?;
        let failed = lines(&outcomes, "denied: ")?;
        anyhow::ensure!(failed.is_empty(), "root on the node is denied: {}", failed.join("; "));
        Ok(())
    }

    /// Checks that each attack fails in the provisioner's containers. A test of the driver checks that their socket serves no Node
    /// service.
    async fn as_provisioner(&self) -> Result<()> {
        for pod in self.env.live_driver_pods().await? {
            let root = Container::of(&pod, PROVISIONER)?.root();
            self.place(&root).await?;
            let pods = self.env.driver_pods();
            let outcomes = exec_in(&pods, &pod.name_any(), PROVISIONER, &self.argv()).await;
            self.remove(&root).await?;
            let outcomes = outcomes?;
            anyhow::ensure!(outcomes.succeeded, "the attack did not run: {}", outcomes.stderr);
            let succeeded = lines(&outcomes.stdout, "succeeded: ")?;
            anyhow::ensure!(
                succeeded.is_empty(),
                "an attacker in the container {PROVISIONER} can {}",
                succeeded.join("; can ")
            );
        }
        Ok(())
    }

    fn argv(&self) -> [&str; 5] {
        [PROGRAM, "attack", &self.volume, KUBELET_ROOT, &self.node_socket]
    }

    /// Puts the files of the attack into the root file system at `root`.
    async fn place(&self, root: &str) -> Result<()> {
        let directory = format!("{root}{DIRECTORY}");
        let argv = ["sh", "-ec", PLACE, "sh", &directory, &self.program];
        self.node.output(&argv).await.map(drop)
    }

    async fn remove(&self, root: &str) -> Result<()> {
        let directory = format!("{root}{DIRECTORY}");
        self.node.output(&["rm", "-r", &directory]).await.map(drop)
    }
}

/// Returns the ends of the lines that begin with these words. It is an error if there are no lines at all.
fn lines<'a>(output: &'a str, begin: &str) -> Result<Vec<&'a str>> {
    output.lines().next().context("the attack printed nothing")?;
    Ok(output.lines().filter_map(|line| line.strip_prefix(begin)).collect())
}

/// Allows programs in the provisioner's container to get the privileges of their files.
async fn allow_privileges(env: &TestEnv<'_>) -> Result<()> {
    let context = json!({"allowPrivilegeEscalation": true});
    change_container(env, &json!({"name": PROVISIONER, "securityContext": context})).await
}
