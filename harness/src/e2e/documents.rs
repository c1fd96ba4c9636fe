//! Pastes the blocks of commands of the documents, as a reader does: on a machine with kind and a spare disk. The order is one in
//! which each command can succeed. `harness/book/tests/book/commands.toml` has all blocks of the documents, with what runs them.

use std::time::Duration;

use anyhow::{Context, Result};
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::kind::{KindMachine, SPARE_DISK};

use super::console;
use super::kind::TOOL;
use super::scenario::{Scenario, StepResult};

/// The name of the scenario.
const NAME: &str = "documents";
/// The time for one block. An emulated node pulls no image, but it starts pods.
const TIMEOUT: Duration = Duration::from_secs(900);

const README: &str = "README.md";
const INSTALL: &str = "docs/src/install.md";
const UNINSTALL: &str = "docs/src/uninstall.md";
const ONE_DISK: &str = "docs/kubelet-on-the-data-disk.md";

/// The path that stands for the reader's disk in the documents.
const DISK: &str = "/dev/disk/by-id/DISK";
/// What replaces the UUID that `loopfs data-dir format` prints.
const UUID: &str = "$(blkid --match-tag UUID --output value /dev/disk/by-id/DISK)";
const WITH_UUID: &str = "UUID=$(blkid --match-tag UUID --output value /dev/disk/by-id/DISK)";

/// The container that is the node of kind's cluster.
const NODE: &str = "kind-control-plane";

/// A block of commands.
struct Block {
    document: &'static str,
    /// Its first line, by which it is found.
    begins: &'static str,
    place: Place,
    /// Commands that bring about what the document supposes.
    before: &'static str,
    /// What the reader has to fill in, and what the test does.
    filled_in: &'static [(&'static str, &'static str)],
    /// What the output must contain.
    shows: &'static [&'static str],
}

/// Where a reader runs the commands.
#[derive(Clone, Copy)]
enum Place {
    /// The machine with kubectl and kind, which also stands for a node before Kubernetes is installed.
    Machine,
    /// The node of the cluster, in a directory with the archive of the image.
    Node,
}

/// The blocks in the order in which they are pasted.
const BLOCKS: [Block; 16] = [
    Block {
        before: "kind load image-archive target/images/shell.tar",
        shows: &["condition met", "1.0M", "\"demo\" deleted"],
        ..on_machine(
            README,
            "$ kubectl apply -f csi/examples/pod.yaml                       # a claim of 1Mi, and a pod that uses it",
        )
    },
    // The driver is there already, and stays.
    Block {
        place: Place::Node,
        shows: &["loopfs"],
        ..on_machine(INSTALL, "# ctr --namespace k8s.io images import loopfs.tar")
    },
    Block { shows: &["successfully rolled out"], ..on_machine(INSTALL, "$ kubectl apply -k csi/deploy") },
    Block {
        shows: &["condition met", "1.0M", "\"demo\" deleted"],
        ..on_machine(INSTALL, "$ kubectl apply -f csi/examples/pod.yaml")
    },
    Block {
        before: "kubectl apply -f csi/deploy/snapshot-controller/volumesnapshots.yaml",
        shows: &["volumesnapshots.snapshot.storage.k8s.io"],
        ..on_machine("docs/src/snapshots.md", "$ kubectl get crd volumesnapshots.snapshot.storage.k8s.io")
    },
    Block {
        before: "mkdir -p /var/lib/kubelet/pods /var/lib/kubelet/plugins",
        shows: &["xfs-quota"],
        ..on_machine(INSTALL, "# loopfs doctor --kubelet-dir /var/lib/kubelet")
    },
    Block {
        filled_in: &[("THE-UUID", UUID)],
        shows: &["project limits are enforced"],
        ..on_machine(INSTALL, "# loopfs data-dir format /dev/disk/by-id/DISK --yes-format-this-disk")
    },
    // The next block formats the same disk, and refuses one that is not empty.
    on_machine(UNINSTALL, "# umount /var/lib/loopfs/data && blkdiscard --force --zeroout --length 4194304 /dev/disk/by-id/DISK"),
    Block {
        filled_in: &[("/dev/disk/by-id/...", DISK), ("UUID=...", WITH_UUID)],
        ..on_machine(
            README,
            "# loopfs data-dir format /dev/disk/by-id/... --yes-format-this-disk   # refuses a disk that is not empty; prints the UUID",
        )
    },
    on_machine(ONE_DISK, "# mkdir -p /var/lib/loopfs/data/kubelet /var/lib/kubelet"),
    on_machine(ONE_DISK, "# loopfs quota set --id 1048576 --bytes 20GiB /var/lib/kubelet"),
    on_machine(
        UNINSTALL,
        "$ kubectl get pv -o custom-columns=NAME:.metadata.name,DRIVER:.spec.csi.driver,CLAIM:.spec.claimRef.name",
    ),
    Block {
        shows: &["\"loopfs-objects\" deleted"],
        ..on_machine(UNINSTALL, "$ kubectl -n loopfs-system delete configmap loopfs-objects")
    },
    Block {
        shows: &["daemonset.apps \"loopfs\" deleted"],
        ..on_machine(UNINSTALL, "$ kubectl delete -k csi/deploy --ignore-not-found")
    },
    Block {
        place: Place::Node,
        ..on_machine("docs/src/failures.md", "# rm /var/lib/loopfs/data.filesystem-uuid")
    },
    // If the driver had left a loop device, the last command would find the file system in use.
    on_machine("docs/src/kind.md", "$ kind delete cluster"),
];

const fn on_machine(document: &'static str, begins: &'static str) -> Block {
    Block { document, begins, place: Place::Machine, before: "true", filled_in: &[], shows: &[] }
}

/// Pastes the blocks. The first that fails ends the scenario. The cluster is removed at the end.
pub(super) async fn run(session: &Session, report: &mut Report, machine: &KindMachine) {
    // The report has the reason of a failure.
    drop(paste_all(&mut Scenario::begin(session, report, NAME), machine).await);
}

async fn paste_all(scenario: &mut Scenario<'_>, machine: &KindMachine) -> StepResult {
    let prepared = format!(
        "install {TOOL} /usr/local/bin/loopfs
docker cp target/images/loopfs.tar {NODE}:/root/loopfs.tar
mkdir -p /dev/disk/by-id
ln -s \"/dev/$(basename $(dirname $(grep -lx {SPARE_DISK} /sys/block/*/serial)))\" {DISK}
kubectl apply -k csi/deploy
kubectl --namespace loopfs-system rollout status daemonset/loopfs --timeout 20m"
    );
    scenario.step("prepare what the documents suppose", machine.shell(&prepared, TIMEOUT)).await?;
    for block in BLOCKS {
        let title = format!("{}: {}", block.document, block.begins);
        let pasted = block.paste(scenario.session(), machine);
        scenario.step(&title, pasted).await?;
    }
    Ok(())
}

impl Block {
    async fn paste(&self, session: &Session, machine: &KindMachine) -> Result<()> {
        let path = session.workspace.root().join(self.document);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        machine.shell(self.before, TIMEOUT).await.context("before the block")?;
        let output = machine.shell(&self.script(&text)?, TIMEOUT).await?;
        for expected in self.shows {
            anyhow::ensure!(output.contains(expected), "the output has no {expected:?}:\n{output}");
        }
        Ok(())
    }

    /// Returns the commands as the reader runs them.
    fn script(&self, document: &str) -> Result<String> {
        let mut commands = console::beginning_with(document, self.begins)?;
        for (placeholder, value) in self.filled_in {
            anyhow::ensure!(commands.contains(placeholder), "{}: no {placeholder:?} to fill in", self.begins);
            commands = commands.replace(placeholder, value);
        }
        Ok(match self.place {
            Place::Machine => commands,
            Place::Node => format!(
                "docker exec --interactive --workdir /root {NODE} sh -e <<'END-OF-BLOCK'\n{commands}\nEND-OF-BLOCK"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn each_block_is_in_its_document_and_nothing_is_left_to_fill_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for block in BLOCKS {
            let document = std::fs::read_to_string(root.join(block.document)).unwrap();
            let script = block.script(&document).unwrap();
            assert!(!script.contains("...") && !script.contains("THE-"), "{script}");
        }
    }

    #[test]
    fn a_value_without_its_placeholder_is_an_error() {
        let block = Block { filled_in: &[("NAME", "value")], ..on_machine("page", "$ a") };
        assert_eq!(
            block.script("```console\n$ a NAME\n```\n").unwrap_err().to_string(),
            "no block of commands begins with \"$ a\""
        );
        let block = Block { filled_in: &[("NAME", "value")], ..on_machine("page", "$ a NAME") };
        assert_eq!(block.script("```console\n$ a NAME\n```\n").unwrap(), "a value");
        let block = Block { filled_in: &[("OTHER", "value")], ..on_machine("page", "$ a NAME") };
        assert!(block.script("```console\n$ a NAME\n```\n").is_err());
    }
}
