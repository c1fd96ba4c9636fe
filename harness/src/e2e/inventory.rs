//! What the driver has on a node, as the node's kernel and file systems show it to anybody: files,
//! project quotas, loop devices, mounts. What is more after a run than before has leaked.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cluster::{DATA_DIR, Node};

/// Longer than any of the tools takes on a busy emulated processor.
const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// One look at a node. Each entry is a sentence that names the thing.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Inventory {
    entries: BTreeSet<String>,
}

impl Inventory {
    pub(super) async fn take(node: &Node) -> Result<Inventory> {
        let files = output(
            node,
            &["find", DATA_DIR, "-ignore_readdir_race", "-mindepth", "1", "-printf", "%y %P\\n"],
        )
        .await?;
        let report = "report -p -n -N -b -i";
        let quotas = output(node, &["xfs_quota", "-x", "-c", report, DATA_DIR]).await?;
        let loops =
            output(node, &["losetup", "--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"])
                .await?;
        let mounts = output(node, &["cat", "/proc/self/mountinfo"]).await?;
        let mut entries = BTreeSet::new();
        entries.extend(parse_files(&files));
        entries.extend(parse_quotas(&quotas));
        entries.extend(parse_loops(&loops));
        entries.extend(parse_mounts(&mounts));
        Ok(Inventory { entries })
    }

    /// What is here and was not there before.
    pub(super) fn beyond(&self, before: &Inventory) -> Vec<String> {
        self.entries.difference(&before.entries).cloned().collect()
    }
}

async fn output(node: &Node, argv: &[&str]) -> Result<String> {
    node.output(argv, TOOL_DEADLINE).await
}

/// Lines of `TYPE PATH` below the data directory.
fn parse_files(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let (kind, path) = line.split_once(' ')?;
        let kind = match kind {
            "d" => "directory",
            "f" => "file",
            _ => "special file",
        };
        Some(format!("{kind} {DATA_DIR}/{path}"))
    })
}

/// Rows of `xfs_quota report`: `#ID USED SOFT HARD ..`. Id 0 is everything that has none.
fn parse_quotas(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let id = words.next()?.strip_prefix('#').filter(|id| *id != "0")?;
        let numbers: Vec<&str> =
            words.filter(|word| word.bytes().all(|byte| byte.is_ascii_digit())).collect();
        let (used, hard) = (numbers.first()?, numbers.get(2)?);
        (*used != "0" || *hard != "0")
            .then(|| format!("project id {id} with {used} blocks used and a limit of {hard}"))
    })
}

fn parse_loops(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let (device, file) = line.trim().split_once(' ')?;
        Some(format!("loop device {device} attached to {}", file.trim()))
    })
}

/// Mounts that CSI volumes are shown through, wherever they lead.
fn parse_mounts(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(3);
        let (root, target) = (words.next()?, words.next()?);
        let of_csi = ["kubernetes.io~csi", "kubernetes.io/csi"].iter().any(|part| target.contains(part));
        of_csi.then(|| format!("mount of {root} at {target}"))
    })
}

/// Where and with which options the mounts of CSI volumes of the driver's file system are, at this moment.
pub(super) async fn volume_mounts(node: &Node) -> Result<Vec<(String, Vec<String>)>> {
    let mounts = output(node, &["cat", "/proc/self/mountinfo"]).await?;
    let of_csi = mounts.lines().filter_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let (target, options) = (words.get(4)?, words.get(5)?);
        let options = options.split(',').map(str::to_owned).collect();
        (target.contains("kubernetes.io~csi") && target.ends_with("/mount"))
            .then(|| ((*target).to_owned(), options))
    });
    Ok(of_csi.collect())
}

/// The inventory's promise is that its tools answer; a node whose data directory is not mounted still does.
pub(super) async fn is_mounted(node: &Node, path: &str) -> Result<bool> {
    let mounts = output(node, &["cat", "/proc/self/mountinfo"]).await.context("read the node's mounts")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(4) == Some(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(entries: impl Iterator<Item = String>) -> Vec<String> {
        entries.collect()
    }

    #[test]
    fn files_are_named_with_their_kind() {
        assert_eq!(
            all(parse_files("d volumes\nf volumes/a b\n")),
            [format!("directory {DATA_DIR}/volumes"), format!("file {DATA_DIR}/volumes/a b")]
        );
    }

    #[test]
    fn a_quota_counts_while_it_has_a_limit_or_a_use() {
        let report = "#0         0          0          0     00 [--------]\n\
                      #2000000   0          0       1024     00 [--------]          2   0  512  00 [--------]\n\
                      #2000001   4          0          0     00 [--------]\n\
                      #2000002   0          0          0     00 [--------]\n";
        assert_eq!(
            all(parse_quotas(report)),
            [
                "project id 2000000 with 0 blocks used and a limit of 1024",
                "project id 2000001 with 4 blocks used and a limit of 0",
            ]
        );
    }

    #[test]
    fn loop_devices_keep_what_they_lost() {
        assert_eq!(
            all(parse_loops("/dev/loop0 /var/lib/loopfs/data/x (deleted)\n")),
            ["loop device /dev/loop0 attached to /var/lib/loopfs/data/x (deleted)"]
        );
    }

    #[test]
    fn only_mounts_of_csi_volumes_count() {
        let text = "22 1 0:5 / /proc rw - proc proc rw\n\
                    90 1 8:1 /volumes/v /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount rw - xfs /dev/vdb rw\n";
        assert_eq!(
            all(parse_mounts(text)),
            ["mount of /volumes/v at /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount"]
        );
    }

    #[test]
    fn only_what_is_new_has_leaked() {
        let take =
            |entries: &[&str]| Inventory { entries: entries.iter().map(|e| (*e).to_owned()).collect() };
        assert_eq!(take(&["a", "b"]).beyond(&take(&["a", "gone"])), ["b"]);
    }
}
