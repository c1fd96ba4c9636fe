//! A kubelet that is killed and started again, while pods use volumes.

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::List;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::containers::{self, Container};
use testvm_cluster::{Node, objects};
use tokio::time::{Instant, sleep};

use super::tenants::{GROWN, HOSTILE, OTHER, Tenants};
use crate::e2e::parts::serving;
use crate::test_env::environment::TestEnv;
use crate::test_env::{claims, pods};

/// Prints the process of the kubelet.
const PROCESS: &str = "for process in /proc/[0-9]*; do \
                       if read -r name 2>/dev/null < $process/comm && [ \"$name\" = kubelet ]; then echo $process; fi; done";
/// The poll interval: no event announces that the kubelet responds.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn run(steps: &mut Steps<'_>, tenants: &Tenants<'_>) -> StepResult {
    let Tenants { env, node, other, .. } = *tenants;
    let processes = async || Ok([process(env, node, HOSTILE).await?, process(other, node, OTHER).await?]);
    let before = steps.step("both tenants' pods run", processes()).await?;
    steps.step("the kubelet alone is killed, and back", restart(env, node)).await?;
    let stayed = async {
        let now = processes().await?;
        anyhow::ensure!(now == before, "the processes of the pods were {before:?} and are {now:?}");
        pods::write(env, HOSTILE, "/vol/after", "the restart").await?;
        pods::check_text(env, HOSTILE, "/vol/after", "the restart").await?;
        tenants.check_other_data().await
    };
    steps.step("both pods run on, and read and write their volumes", stayed).await?;
    let grown = async {
        claims::request_size(env, HOSTILE, GROWN).await?;
        claims::until_expanded(env, HOSTILE, GROWN).await
    };
    steps.step("a volume is expanded in use", grown).await
}

/// Returns the process of a pod's container. Its status in the API is that of the former kubelet until the new one writes it.
async fn process(env: &TestEnv<'_>, node: &Node, name: &str) -> Result<String> {
    let pod = objects::read(&env.pods(), name).await?;
    containers::process(node, &Container::of(&pod, "volume-check")?).await
}

/// Returns `true` if a list of pods, as the kubelet serves it, has both tenants' pods.
fn knows(page: &str) -> bool {
    serde_json::from_str::<List<Pod>>(page).is_ok_and(|pods| {
        [HOSTILE, OTHER].iter().all(|name| pods.items.iter().any(|pod| pod.name_any() == *name))
    })
}

/// Kills the kubelet, and waits until its successor knows both pods and the driver is registered with it. The kubelet responds
/// before it has read the pods of its node, and refuses to run commands in them until then.
async fn restart(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    let process = async || node.output(&["sh", "-c", PROCESS]).await;
    let before = process().await?;
    node.kill_kubelet().await?;
    let deadline = Instant::now() + env.timeouts.start;
    loop {
        let now = process().await?;
        let is_new = !now.is_empty() && now != before;
        let knows_pods = is_new && node.kubelet_page("/pods").await.is_ok_and(|page| knows(&page));
        if knows_pods {
            return serving::served(env).await;
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "the kubelet does not know the pods {HOSTILE} and {OTHER}: it was {before:?}, now {now:?}"
        );
        sleep(POLL_INTERVAL).await;
    }
}
