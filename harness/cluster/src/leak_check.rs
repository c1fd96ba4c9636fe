//! A leak check: the files and mounts that a driver has on a node, before a test and after it.
//!
//! An entry is a text that names one object. A driver with other kinds of objects, such as devices or quotas, collects entries
//! of its own.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use testvm::excerpt::list;

use super::mount_table::{Mounted, mounts};
use super::node::Node;

/// The objects on a node at one moment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Entries(BTreeMap<String, usize>);

impl FromIterator<String> for Entries {
    fn from_iter<I: IntoIterator<Item = String>>(entries: I) -> Entries {
        let mut counts = BTreeMap::new();
        for entry in entries {
            *counts.entry(entry).or_default() += 1;
        }
        Entries(counts)
    }
}

impl Entries {
    /// Returns the files below the mount point `directory` of a file system, and all mounts of that file system. The mounts
    /// in a container are its own, and are not among them.
    ///
    /// # Errors
    /// The node cannot be reached, or `directory` is not a mount point.
    pub async fn of_file_system(node: &Node, directory: &str) -> Result<Entries> {
        let find = ["find", directory, "-mindepth", "1", "-printf", "%y %p\\0"];
        let files = parse_files(&node.output(&find).await?)?;
        let mounts = of_same_device(&mounts(node).await?, directory)
            .with_context(|| format!("{directory} of {} is not a mount point", node.name()))?;
        Ok(files.into_iter().chain(mounts).collect())
    }

    /// Returns the entries that are here and were not there before, or not as often.
    #[must_use]
    pub fn added_since(&self, before: &Entries) -> Vec<String> {
        let more = self.0.iter().filter_map(|(entry, count)| {
            let before = before.0.get(entry).copied().unwrap_or_default();
            (*count > before).then(|| match before {
                0 => entry.clone(),
                _ => format!("{entry}, {count} times rather than {before}"),
            })
        });
        more.collect()
    }

    /// Checks that there is no entry that was not there before.
    ///
    /// # Errors
    /// There is one; the message has all of them.
    pub fn require_none_added_since(&self, before: &Entries) -> Result<()> {
        let added = self.added_since(before);
        anyhow::ensure!(added.is_empty(), "left on the node: {}", list(&added));
        Ok(())
    }
}

/// Parses `TYPE PATH` with a NUL after each.
fn parse_files(text: &str) -> Result<Vec<String>> {
    let files = text.split_terminator('\0').map(|file| {
        let (kind, path) = file.split_once(' ').with_context(|| format!("find printed {file:?}"))?;
        let kind = match kind {
            "d" => "directory",
            "f" => "file",
            _ => "special file",
        };
        Ok(format!("{kind} {path}"))
    });
    files.collect()
}

/// Returns the mounts of the device that is mounted at `directory`, or `None` if there is none.
fn of_same_device(mounts: &[Mounted], directory: &str) -> Option<Vec<String>> {
    // The last mount at a path is the visible one.
    let device = &mounts.iter().rev().find(|mount| mount.target == directory)?.device;
    let of_device = mounts.iter().filter(|mount| mount.device == *device);
    Some(of_device.map(|Mounted { root, target, .. }| format!("mount of {root} at {target}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table;

    fn entries(names: &[&str]) -> Entries {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn only_new_entries_have_leaked() {
        assert_eq!(entries(&["a", "b"]).added_since(&entries(&["a", "gone"])), ["b"]);
        assert_eq!(entries(&["a", "a"]).added_since(&entries(&["a", "b"])), ["a, 2 times rather than 1"]);
        entries(&["a"]).require_none_added_since(&entries(&["a", "a"])).unwrap();
        let error = entries(&["a", "b"]).require_none_added_since(&entries(&[])).unwrap_err().to_string();
        assert_eq!(error, "left on the node: 2:\n  a\n  b");
    }

    #[test]
    fn files_are_listed_with_their_kind() {
        let files = parse_files("d /data/v\0f /data/v/a b\0s /data/socket\0").unwrap();
        assert_eq!(files, ["directory /data/v", "file /data/v/a b", "special file /data/socket"]);
        assert!(parse_files("").unwrap().is_empty());
        assert!(parse_files("d\0").is_err());
    }

    #[test]
    fn only_mounts_of_filesystem_are_listed() {
        let text = "20 1 254:0 / / rw - ext4 /dev/vda rw\n\
                    22 1 0:5 / /proc rw - proc proc rw\n\
                    90 1 8:1 / /data rw - xfs /dev/vdb rw\n\
                    91 1 8:1 /v /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount rw - xfs /dev/vdb rw\n";
        let mounts = mount_table::parse(text).unwrap();
        assert_eq!(
            of_same_device(&mounts, "/data").unwrap(),
            [
                "mount of / at /data",
                "mount of /v at /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount"
            ]
        );
        assert_eq!(of_same_device(&mounts, "/other"), None);
    }
}
