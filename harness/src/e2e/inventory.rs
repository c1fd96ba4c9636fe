//! What the driver has on a node, as the node's kernel and file systems show it to anybody: files,
//! project quotas, loop devices, mounts. What is more after a run than before has leaked.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cluster::{DATA_DIR, Node};

/// Longer than any of the tools takes on a busy emulated processor.
const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// One look at a node. Each entry is a sentence that names the thing, without what a reboot may change: which
/// loop device it is that a file is attached to, and how many blocks a volume's content takes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Inventory {
    entries: BTreeMap<String, usize>,
    /// Files of the data directory that have a loop device, once for each they have.
    attached: Vec<String>,
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
        let loops: Vec<String> = parse_loops(&loops).collect();
        let devices = loops.iter().map(|file| format!("loop device attached to {file}"));
        let all =
            parse_files(&files).chain(parse_quotas(&quotas)).chain(devices).chain(parse_mounts(&mounts));
        let entries = count(all);
        let ours = |file: &String| Path::new(file).starts_with(DATA_DIR);
        Ok(Inventory { entries, attached: loops.into_iter().filter(ours).collect() })
    }

    /// What is here and was not there before, or not as often.
    pub(super) fn beyond(&self, before: &Inventory) -> Vec<String> {
        let more = self.entries.iter().filter_map(|(entry, count)| {
            let before = before.entries.get(entry).copied().unwrap_or_default();
            (*count > before).then(|| match before {
                0 => entry.clone(),
                _ => format!("{entry}, {count} times rather than {before}"),
            })
        });
        more.collect()
    }

    /// The images of the driver's volumes that have a loop device, each as often as it has one.
    pub(super) fn attached(&self) -> &[String] {
        &self.attached
    }
}

fn count(entries: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    entries.fold(BTreeMap::new(), |mut counts, entry| {
        *counts.entry(entry).or_default() += 1;
        counts
    })
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
        match (*used, *hard) {
            ("0", "0") => None,
            (used, "0") => Some(format!("project id {id} without a limit and with {used} blocks used")),
            (_, hard) => Some(format!("project id {id} with a limit of {hard} blocks")),
        }
    })
}

/// What the devices are attached to.
fn parse_loops(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| Some(line.trim().split_once(' ')?.1.trim().to_owned()))
}

/// Mounts that CSI volumes are shown through, wherever they lead.
fn parse_mounts(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(3);
        // Of a block volume, the first is the name of its loop device.
        let (root, target) = (words.next()?, words.next()?);
        let of_csi = ["kubernetes.io~csi", "kubernetes.io/csi"].iter().any(|part| target.contains(part));
        of_csi.then(|| match root.strip_prefix("/loop") {
            Some(_) => format!("mount of a loop device at {target}"),
            None => format!("mount of {root} at {target}"),
        })
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
                "project id 2000000 with a limit of 1024 blocks",
                "project id 2000001 without a limit and with 4 blocks used",
            ]
        );
    }

    #[test]
    fn loop_devices_keep_what_they_lost() {
        assert_eq!(
            all(parse_loops("/dev/loop0 /var/lib/loopfs/data/x (deleted)\n")),
            ["/var/lib/loopfs/data/x (deleted)"]
        );
    }

    #[test]
    fn only_mounts_of_csi_volumes_count() {
        let text = "22 1 0:5 / /proc rw - proc proc rw\n\
                    90 1 8:1 /volumes/v /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount rw - xfs /dev/vdb rw\n\
                    91 1 0:5 /loop65536 /var/lib/kubelet/plugins/kubernetes.io/csi/b rw - devtmpfs dev rw\n";
        assert_eq!(
            all(parse_mounts(text)),
            [
                "mount of /volumes/v at /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount",
                "mount of a loop device at /var/lib/kubelet/plugins/kubernetes.io/csi/b",
            ]
        );
    }

    #[test]
    fn only_what_is_new_has_leaked() {
        let take = |entries: &[&str]| Inventory {
            entries: count(entries.iter().map(|entry| (*entry).to_owned())),
            attached: Vec::new(),
        };
        assert_eq!(take(&["a", "b"]).beyond(&take(&["a", "gone"])), ["b"]);
        assert_eq!(take(&["a", "a"]).beyond(&take(&["a", "b"])), ["a, 2 times rather than 1"]);
        assert!(take(&["a"]).beyond(&take(&["a", "a"])).is_empty());
    }
}
