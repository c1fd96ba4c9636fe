//! A pod detaches its own device, which needs no capability, and the driver that held the device open is killed. The container still has the
//! node of the device: if the kernel bound its index to the volume of another pod, it could read and overwrite that volume.

use anyhow::Result;
use testvm_cluster::Node;
use testvm_cluster::exec::exec;

use super::node_without_storage::driver_pod;
use crate::test_env::disturbances::kill;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, check_text, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Held, VolumeMode, scratch_pod};

/// The name of the pod and its claim.
pub(in crate::e2e) const ATTACKER: &str = "detaches-its-device";
const DEVICE: &str = "/vol";
const SECRET: &str = "the secret of the next device";
const ATTACK: &str = "overwritten by another pod";

/// Starts the pod with its claim.
pub(in crate::e2e) async fn start(env: &TestEnv<'_>) -> Result<()> {
    let held = Held { claim: ATTACKER, path: DEVICE, mode: VolumeMode::Block, read_only: false };
    pods::create(env, &scratch_pod(ATTACKER, Size::mebibytes(1), &[held])?).await
}

pub(in crate::e2e) async fn detach(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    read_and_overwrite(env).await?;
    let own = read_and_overwrite(env).await?;
    anyhow::ensure!(own.contains(ATTACK), "pod {ATTACKER} reads {own:?} from its own device");
    let detached = exec(&env.pods(), ATTACKER, &["/bin/sh", "-c", &format!("losetup -d {DEVICE}")]).await?;
    anyhow::ensure!(detached.succeeded, "losetup -d in pod {ATTACKER} fails: {}", detached.stderr);
    kill(env, node, &driver_pod(env, node).await?, "csi").await.map(drop)
}

/// Checks that the pod reads and overwrites none of the devices of these pods, which were attached later.
pub(in crate::e2e) async fn attack(env: &TestEnv<'_>, others: &[&str]) -> Result<()> {
    for name in others {
        write(env, name, DEVICE, SECRET).await?;
    }
    let read = read_and_overwrite(env).await?;
    anyhow::ensure!(!read.contains(SECRET), "pod {ATTACKER} reads what another pod wrote");
    for name in others {
        check_text(env, name, DEVICE, SECRET).await?;
    }
    Ok(())
}

/// Returns what the attacker reads from its device. Both fail if the device is bound to no image.
async fn read_and_overwrite(env: &TestEnv<'_>) -> Result<String> {
    let script = format!("head -c 4096 {DEVICE}; printf '{ATTACK}' | dd of={DEVICE} conv=fsync");
    Ok(exec(&env.pods(), ATTACKER, &["/bin/sh", "-c", &script]).await?.stdout)
}
