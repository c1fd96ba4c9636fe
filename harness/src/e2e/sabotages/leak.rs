//! Objects that stay on the node: one of each kind that an [`Inventory`](crate::test_env::inventory::Inventory) has.

use anyhow::Result;

use super::data_files::on_node;
use crate::test_env::environment::TestEnv;

/// The project id is not one of the store or of the kubelet, which would free theirs. The loop device is read-only, because the
/// driver also finds the writable devices of other programs and detaches them with its own.
const LEAK: &str = "mkdir -p DATA/leaked /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
truncate --size 1M DATA/leaked/file
losetup --read-only --find DATA/leaked/file
mount --bind DATA/leaked /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
xfs_quota -x -c 'limit -p bhard=1m 4242' DATA";

const REMOVE_LEAK: &str = "umount /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
rmdir /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
losetup --detach \"$(losetup --noheadings --output NAME --associated DATA/leaked/file)\"
rm -r DATA/leaked
xfs_quota -x -c 'limit -p bhard=0 4242' DATA";

/// What the inventory reports of the leak.
pub(super) const LEAKED: &[&str] = &[
    "leaked",
    "loop device attached to",
    "project id 4242 with a limit of 1024 blocks",
    "mount of /leaked at",
    "/leaked/file",
];

pub(super) async fn leak(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, LEAK).await?;
    env.timeouts.shorten();
    Ok(())
}

pub(super) async fn remove_leak(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, REMOVE_LEAK).await
}
