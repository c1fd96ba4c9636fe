//! Pastes the blocks of commands of the documents, as a reader does: on a machine with kind and a spare disk. The order is one in
//! which each command can succeed.

use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::kind::{KindMachine, SPARE_DISK};

use super::console::{self, Block, NODE, Place, TIMEOUT, TOOL};

/// The name of the story.
const NAME: &str = "documents";

const README: &str = "README.md";
const INSTALL: &str = "docs/src/install.md";
const UNINSTALL: &str = "docs/src/uninstall.md";
const ONE_DISK: &str = "docs/kubelet-on-the-data-disk.md";

/// The path that stands for the reader's disk in the documents.
const DISK: &str = "/dev/disk/by-id/DISK";
/// What replaces the UUID that `loopfs data-dir format` prints.
const UUID: &str = "$(blkid --match-tag UUID --output value /dev/disk/by-id/DISK)";
const WITH_UUID: &str = "UUID=$(blkid --match-tag UUID --output value /dev/disk/by-id/DISK)";

/// The blocks in the order in which they are pasted.
pub(super) const BLOCKS: [Block; 15] = [
    Block {
        before: "kind load image-archive target/images/shell.tar",
        shows: &["condition met", "1.0M", "\"demo\" deleted"],
        ..Block::new(
            README,
            "$ kubectl apply -f csi/examples/pod.yaml                       # a claim of 1Mi, and a pod that uses it",
        )
    },
    // The driver is there already, and stays.
    Block {
        place: Place::Node,
        shows: &["loopfs"],
        ..Block::new(INSTALL, "# ctr --namespace k8s.io images import loopfs.tar")
    },
    Block { shows: &["successfully rolled out"], ..Block::new(INSTALL, "$ kubectl apply -k csi/deploy") },
    Block {
        shows: &["condition met", "1.0M", "\"demo\" deleted"],
        ..Block::new(INSTALL, "$ kubectl apply -f csi/examples/pod.yaml")
    },
    Block {
        before: "kubectl apply -f csi/deploy/snapshot-controller/volumesnapshots.yaml",
        shows: &["volumesnapshots.snapshot.storage.k8s.io"],
        ..Block::new("docs/src/snapshots.md", "$ kubectl get crd volumesnapshots.snapshot.storage.k8s.io")
    },
    Block {
        before: "mkdir -p /var/lib/kubelet/pods /var/lib/kubelet/plugins",
        shows: &["xfs-quota"],
        ..Block::new(INSTALL, "# loopfs doctor --kubelet-dir /var/lib/kubelet")
    },
    Block {
        filled_in: &[("THE-UUID", UUID)],
        shows: &["project limits are enforced"],
        ..Block::new(INSTALL, "# loopfs data-dir format /dev/disk/by-id/DISK --yes-format-this-disk")
    },
    // The next block formats the same disk, and refuses one that is not empty.
    Block::new(
        UNINSTALL,
        "# umount /var/lib/loopfs/data && blkdiscard --force --zeroout --length 4194304 /dev/disk/by-id/DISK",
    ),
    Block {
        filled_in: &[("/dev/disk/by-id/...", DISK), ("UUID=...", WITH_UUID)],
        ..Block::new(
            README,
            "# loopfs data-dir format /dev/disk/by-id/... --yes-format-this-disk   # refuses a disk that is not empty; prints the UUID",
        )
    },
    Block::new(ONE_DISK, "# mkdir -p /var/lib/loopfs/data/kubelet /var/lib/kubelet"),
    Block::new(ONE_DISK, "# loopfs quota set --id 1048576 --bytes 20GiB /var/lib/kubelet"),
    Block::new(
        UNINSTALL,
        "$ kubectl get pv -o custom-columns=NAME:.metadata.name,DRIVER:.spec.csi.driver,CLAIM:.spec.claimRef.name",
    ),
    Block {
        shows: &["\"loopfs-objects\" deleted"],
        ..Block::new(UNINSTALL, "$ kubectl -n loopfs-system delete configmap loopfs-objects")
    },
    Block {
        shows: &["daemonset.apps \"loopfs\" deleted"],
        ..Block::new(UNINSTALL, "$ kubectl delete -k csi/deploy --ignore-not-found")
    },
    Block {
        place: Place::Node,
        ..Block::new("docs/src/failures.md", "# rm /var/lib/loopfs/data.filesystem-uuid")
    },
];

/// The last block. If the driver had left a loop device, its last command would find the file system in use.
pub(super) const REMOVAL: [Block; 1] = [Block::new("docs/src/kind.md", "$ kind delete cluster")];

/// Pastes all blocks but the last, which uninstall the driver at their end.
pub(super) async fn run(session: &Session, report: &mut Report, machine: &KindMachine) -> StepResult {
    let mut steps = Steps::begin(session, report, NAME);
    let prepared = format!(
        "install {TOOL} /usr/local/bin/loopfs
docker exec -i {NODE} sh -c 'cat > ~root/loopfs.tar' < target/images/loopfs.tar
mkdir -p /dev/disk/by-id
ln -s \"/dev/$(basename $(dirname $(grep -lx {SPARE_DISK} /sys/block/*/serial)))\" {DISK}
kubectl apply -k csi/deploy
kubectl --namespace loopfs-system rollout status daemonset/loopfs --timeout 20m"
    );
    steps.step("prepare what the documents suppose", machine.shell(&prepared, TIMEOUT)).await?;
    console::paste_all(&mut steps, machine, &BLOCKS).await
}

/// Removes the cluster, as a document says.
pub(super) async fn remove_cluster(
    session: &Session,
    report: &mut Report,
    machine: &KindMachine,
) -> StepResult {
    console::paste_all(&mut Steps::begin(session, report, NAME), machine, &REMOVAL).await
}
