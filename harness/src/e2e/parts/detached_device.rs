//! A pod detaches its own device, which needs no capability, and the driver that held the device open is killed. The container still has the
//! node of the device: if the kernel bound its index to the volume of another pod, it could read and overwrite that volume.

use anyhow::Result;
use futures::future::try_join_all;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::Node;
use testvm_cluster::exec::exec;

use super::node_without_storage::driver_pod;
use crate::e2e::stories::install;
use crate::test_env::claims;
use crate::test_env::disturbances::kill;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, check_text, end, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Held, VolumeMode, claim, scratch_pod};

/// The names of the pods and their claims.
const ATTACKER: &str = "detaches-its-device";
const OTHERS: [&str; 2] = ["next-device-1", "next-device-2"];
const SIZE: Size = Size::mebibytes(1);
const DEVICE: &str = "/vol";
const SECRET: &str = "the secret of the next device";
const ATTACK: &str = "overwritten by another pod";

pub(in crate::e2e) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    steps.step("a pod detaches its own device, and the driver is killed", detach(env, node)).await?;
    steps.step("the driver serves requests again", install::served(env)).await?;
    let title = "the pod reads and overwrites none of the devices that are attached next";
    steps.step(title, attack(env)).await?;
    let ended = try_join_all(OTHERS.into_iter().chain([ATTACKER]).map(|name| end_with_volume(env, name)));
    steps.step("the pods end, and their volumes go", async { ended.await.map(drop) }).await
}

async fn detach(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    create_claim(env, ATTACKER).await?;
    let held = Held { claim: ATTACKER, path: DEVICE, mode: VolumeMode::Block, read_only: false };
    pods::create(env, &scratch_pod(ATTACKER, SIZE, &[held])?).await?;
    read_and_overwrite(env).await?;
    let own = read_and_overwrite(env).await?;
    anyhow::ensure!(own.contains(ATTACK), "pod {ATTACKER} reads {own:?} from its own device");
    let detached = exec(&env.pods(), ATTACKER, &["/bin/sh", "-c", &format!("losetup -d {DEVICE}")]).await?;
    anyhow::ensure!(detached.succeeded, "losetup -d in pod {ATTACKER} fails: {}", detached.stderr);
    kill(env, node, &driver_pod(env, node).await?, "csi").await.map(drop)
}

async fn attack(env: &TestEnv<'_>) -> Result<()> {
    try_join_all(OTHERS.map(|name| start_with_secret(env, name))).await?;
    let read = read_and_overwrite(env).await?;
    anyhow::ensure!(!read.contains(SECRET), "pod {ATTACKER} reads what another pod wrote");
    for name in OTHERS {
        check_text(env, name, DEVICE, SECRET).await?;
    }
    Ok(())
}

async fn start_with_secret(env: &TestEnv<'_>, name: &str) -> Result<()> {
    create_claim(env, name).await?;
    start(env, name, name, VolumeMode::Block).await?;
    write(env, name, DEVICE, SECRET).await
}

/// Returns what the attacker reads from its device. Both fail if the device is bound to no image.
async fn read_and_overwrite(env: &TestEnv<'_>) -> Result<String> {
    let script = format!("head -c 4096 {DEVICE}; printf '{ATTACK}' | dd of={DEVICE} conv=fsync");
    Ok(exec(&env.pods(), ATTACKER, &["/bin/sh", "-c", &script]).await?.stdout)
}

async fn end_with_volume(env: &TestEnv<'_>, name: &str) -> Result<()> {
    end(env, name).await?;
    claims::delete_with_volume(env, name).await
}

async fn create_claim(env: &TestEnv<'_>, name: &str) -> Result<()> {
    let claim = claim(name, &env.driver.class_name(), SIZE, VolumeMode::Block, "ReadWriteOnce")?;
    claims::create(env, &claim).await.map(drop)
}
