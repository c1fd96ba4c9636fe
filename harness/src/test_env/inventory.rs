//! What the driver has on a node, as the node's kernel and file systems show it: files, project quotas, loop
//! devices, mounts. An entry that a run adds and does not remove has leaked.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use nix::sys::stat::makedev;
use testvm_cluster::Node;
use testvm_cluster::leak_check::Entries;
use testvm_cluster::mount_table::{Mounted, mounts};
use testvm_guest::control::ExecOutput;

use super::projects::{self, Record, is_of_kubelet};
use crate::nodes::{DATA_DIR, KUBELET_DATA_DIR};

/// Number of walks of the data directory after which a deletion that goes on is an error.
const MAX_WALKS: u32 = 20;

/// losetup of util-linux, which a node may not have itself.
const LOSETUP: &str = "/usr/sbin/losetup";

/// One snapshot of a node. Each entry is a sentence that names the object. It omits values that a reboot may
/// change: the number of a loop device, and the blocks of a volume's content.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Inventory {
    entries: Entries,
    /// The files of the data directory that have a loop device, once for each device.
    attached: Vec<String>,
}

impl Inventory {
    pub(crate) async fn take(node: &Node) -> Result<Inventory> {
        let files = walk(node).await?;
        let records = projects::records(node).await?;
        let (losetup, columns) = (node.inspection_program(LOSETUP), "BACK-MAJ:MIN,BACK-INO,BACK-FILE");
        let list = [&losetup, "--list", "--noheadings", "--raw", "--output", columns];
        let loops = node.output(&list).await?;
        let mounts = mounts(node).await?;
        let files = Files::parse(still_there(&files)?)?;
        let loops = parse_loops(&loops, &files)?;
        let devices = loops.iter().map(|(image, _)| format!("loop device attached to {image}"));
        let all = files.entries().chain(quotas(&records)).chain(devices).chain(csi_mounts(&mounts));
        let entries = all.collect();
        let ours = loops.into_iter().filter_map(|(image, ours)| ours.then_some(image));
        Ok(Inventory { entries, attached: ours.collect() })
    }

    /// Returns the entries that are here and were not there before, or not as often.
    pub(crate) fn added_since(&self, before: &Inventory) -> Vec<String> {
        self.entries.added_since(&before.entries)
    }

    /// Returns the volumes that are here and were not there before: images, and directories.
    pub(crate) fn volumes_added_since(&self, before: &Inventory) -> Vec<String> {
        let volumes = format!("{DATA_DIR}/volumes/");
        let is_volume = |entry: &String| {
            let name = entry.split_once(&volumes).map(|(_, name)| name);
            name.is_some_and(|name| !name.contains('/')) && !entry.starts_with("loop device")
        };
        self.added_since(before).into_iter().filter(is_volume).collect()
    }

    /// Returns the images of the driver's volumes that have a loop device, once for each device.
    pub(crate) fn attached(&self) -> &[String] {
        &self.attached
    }
}

/// Walks the data directory, again if a deletion ended the walk.
async fn walk(node: &Node) -> Result<ExecOutput> {
    // The files of the kubelet come and go with pods, and are not the driver's.
    let find = ["find", DATA_DIR, "-path", KUBELET_DATA_DIR, "-prune", "-o", "-printf", "%y %D %i %P\\0"];
    let mut walks = 0;
    loop {
        let found = node.exec(&find).await?;
        walks += 1;
        if walks == MAX_WALKS || !is_ended_by_deletion(&found) {
            return Ok(found);
        }
    }
}

/// Returns `true` if `find` left a tree of deep directories while another program deleted it. It cannot find its way back then, and
/// does not print the rest.
fn is_ended_by_deletion(found: &ExecOutput) -> bool {
    let message = format!(
        "find: failed to read file names from file system at or below '{DATA_DIR}': No such file or directory"
    );
    found.code == 1 && found.stderr.lines().any(|line| line == message)
}

/// Returns the entries that `find` printed. An entry that is deleted during the walk is not an error. `find`
/// still fails for a directory that is deleted before it is opened, even with `-ignore_readdir_race`.
fn still_there(found: &ExecOutput) -> Result<&str> {
    let within = format!("find: '{DATA_DIR}/");
    let went = |line: &str| line.starts_with(&within) && line.ends_with(": No such file or directory");
    let all_went = !found.stderr.is_empty() && found.stderr.lines().all(went);
    anyhow::ensure!(
        found.code == 0 || (found.code == 1 && all_went),
        "in the node: find {DATA_DIR} ended with {}: {}",
        found.code,
        found.stderr.trim()
    );
    Ok(&found.stdout)
}

/// The files of the data directory, by inode number.
struct Files {
    /// The device number of the file system, as the kernel encodes it.
    device: u64,
    by_inode: BTreeMap<u64, (&'static str, String)>,
}

impl Files {
    /// Parses `TYPE DEVICE INODE PATH` with a NUL after each. The first is the data directory itself, with an
    /// empty path.
    fn parse(text: &str) -> Result<Files> {
        let mut files = text.split_terminator('\0').map(|file| {
            let mut words = file.splitn(4, ' ');
            let mut word = || words.next().with_context(|| format!("find printed {file:?}"));
            let kind = match word()? {
                "d" => "directory",
                "f" => "file",
                _ => "special file",
            };
            let (device, inode) = (word()?.parse::<u64>()?, word()?.parse::<u64>()?);
            Ok((device, inode, kind, format!("{DATA_DIR}/{}", word()?)))
        });
        let (device, ..) = files.next().context("find printed nothing")??;
        let by_inode = files.map(|file| file.map(|(_, inode, kind, path)| (inode, (kind, path))));
        Ok(Files { device, by_inode: by_inode.collect::<Result<_>>()? })
    }

    fn entries(&self) -> impl Iterator<Item = String> {
        self.by_inode.values().map(|(kind, path)| format!("{kind} {path}"))
    }
}

/// Returns an entry for each project that has a limit or a use, except those of the kubelet.
fn quotas(records: &BTreeMap<u32, Record>) -> impl Iterator<Item = String> {
    records.iter().filter(|(id, _)| !is_of_kubelet(**id)).filter_map(|(id, record)| match record.limit {
        Some(limit) => Some(format!("project id {id} with a limit of {limit} bytes")),
        None if record.bytes == 0 => None,
        None => Some(format!("project id {id} without a limit and with {} bytes used", record.bytes)),
    })
}

/// Parses rows of `MAJOR:MINOR INODE PATH`. Returns the file that each device is attached to, and whether
/// that file is on the data directory's file system. Such a file is identified by its inode, because the
/// kernel reports the path in the container that attached it. After the container has ended, only a part of
/// that path is left.
fn parse_loops(text: &str, files: &Files) -> Result<Vec<(String, bool)>> {
    let image = |line: &str| {
        let mut words = line.trim().splitn(3, ' ');
        let mut word = || words.next().with_context(|| format!("losetup printed {line:?}"));
        let (device, inode, path) = (word()?, word()?.parse::<u64>()?, word()?);
        let (major, minor) = device.split_once(':').with_context(|| format!("losetup printed {line:?}"))?;
        let ours = makedev(major.parse()?, minor.parse()?) == files.device;
        let known = files.by_inode.get(&inode).filter(|_| ours).map(|(_, path)| path.as_str());
        // The form in which the kernel reports a deleted file, for every path.
        let gone = path.ends_with("(deleted)").then(|| format!("{path}, inode {inode}"));
        Ok((gone.unwrap_or_else(|| known.unwrap_or(path).to_owned()), ours))
    };
    text.lines().map(image).collect()
}

/// Returns the mounts by which CSI volumes are published, wherever they are.
fn csi_mounts(mounts: &[Mounted]) -> impl Iterator<Item = String> {
    mounts.iter().filter_map(|Mounted { root, target, .. }| {
        let of_csi = ["kubernetes.io~csi", "kubernetes.io/csi"].iter().any(|part| target.contains(part));
        // For a block volume, the root of the mount is the name of its loop device.
        of_csi.then(|| match root.strip_prefix("/loop") {
            Some(_) => format!("mount of a loop device at {target}"),
            None => format!("mount of {root} at {target}"),
        })
    })
}

/// Returns the mounts of all CSI volumes on the driver's file system at this moment.
pub(crate) async fn volume_mounts(node: &Node) -> Result<Vec<Mounted>> {
    let of_csi =
        |mount: &Mounted| mount.target.contains("kubernetes.io~csi") && mount.target.ends_with("/mount");
    Ok(mounts(node).await?.into_iter().filter(of_csi).collect())
}

/// Returns `true` if the path is a mount point. Unlike the inventory, this works on a node without the data
/// directory's mount.
pub(crate) async fn is_mounted(node: &Node, path: &str) -> Result<bool> {
    Ok(mounts(node).await?.iter().any(|mount| mount.target == path))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use testvm_cluster::mount_table;

    use super::super::projects::FIRST_OF_KUBELET;
    use super::*;

    fn all(entries: impl Iterator<Item = String>) -> Vec<String> {
        entries.collect()
    }

    /// Device 8:1 as a number.
    const FOUND: &str = "d 2049 128 \0d 2049 131 volumes\0f 2049 132 volumes/a b\0";

    #[test]
    fn files_are_listed_with_their_kind() {
        assert_eq!(
            all(Files::parse(FOUND).unwrap().entries()),
            [format!("directory {DATA_DIR}/volumes"), format!("file {DATA_DIR}/volumes/a b")]
        );
        assert!(Files::parse("").is_err());
    }

    /// Returns what `find` prints with this exit status and these messages, in which `{}` stands for the data directory.
    fn ended_with(code: i32, stderr: &str) -> ExecOutput {
        ExecOutput { code, stdout: FOUND.to_owned(), stderr: stderr.replace("{}", DATA_DIR) }
    }

    #[rstest]
    #[case::all_read(0, "", true)]
    #[case::deleted_during_the_search(1, "find: '{}/volumes/a': No such file or directory\n", true)]
    #[case::not_readable(1, "find: '{}/volumes/a': Input/output error\n", false)]
    #[case::one_of_two(
        1,
        "find: '{}/b': Permission denied\nfind: '{}/a': No such file or directory\n",
        false
    )]
    #[case::the_walk_ended(
        1,
        "find: failed to read file names from file system at or below '{}': No such file or directory\n",
        false
    )]
    #[case::no_data_directory(1, "find: '{}': No such file or directory\n", false)]
    #[case::without_a_message(1, "", false)]
    #[case::killed(137, "find: '{}/volumes/a': No such file or directory\n", false)]
    fn files_deleted_during_the_search_are_no_error(
        #[case] code: i32,
        #[case] stderr: &str,
        #[case] read: bool,
    ) {
        let found = ended_with(code, stderr);
        assert_eq!(still_there(&found).ok(), read.then_some(FOUND));
    }

    #[rstest]
    #[case::deep_directories_deleted(
        1,
        "find: failed to read file names from file system at or below '{}': No such file or directory\n",
        true
    )]
    #[case::one_directory_deleted(1, "find: '{}/volumes/a': No such file or directory\n", false)]
    #[case::not_readable(
        1,
        "find: failed to read file names from file system at or below '{}': Input/output error\n",
        false
    )]
    #[case::all_read(0, "", false)]
    fn a_walk_that_a_deletion_ended_is_repeated(
        #[case] code: i32,
        #[case] stderr: &str,
        #[case] repeated: bool,
    ) {
        assert_eq!(is_ended_by_deletion(&ended_with(code, stderr)), repeated);
    }

    #[test]
    fn quota_with_limit_or_use_counts() {
        let record = |bytes, limit| Record { bytes, inodes: 2, limit };
        let records = BTreeMap::from([
            (1_275_068_416, record(0, Some(1 << 20))),
            (1_275_068_417, record(4096, None)),
            (1_275_068_418, record(0, None)),
            (FIRST_OF_KUBELET, record(8192, Some(1 << 20))),
        ]);
        assert_eq!(
            all(quotas(&records)),
            [
                "project id 1275068416 with a limit of 1048576 bytes",
                "project id 1275068417 without a limit and with 4096 bytes used",
            ]
        );
    }

    #[test]
    fn image_is_identified_by_inode() {
        let files = Files::parse(FOUND).unwrap();
        let loops = |text: &str| parse_loops(text, &files).unwrap();
        let image = format!("{DATA_DIR}/volumes/a b");
        assert_eq!(loops("8:1 132 /volumes/a b\n"), [(image, true)]);
        assert_eq!(loops("8:2 132 /srv/disk\n"), [("/srv/disk".to_owned(), false)]);
        assert_eq!(loops("8:1 140 /volumes/x\n"), [("/volumes/x".to_owned(), true)]);
    }

    #[test]
    fn device_of_deleted_image_is_recognised() {
        let files = Files::parse(FOUND).unwrap();
        let gone = "/volumes/a b (deleted), inode 132".to_owned();
        assert_eq!(parse_loops("8:1 132 /volumes/a b (deleted)\n", &files).unwrap(), [(gone, true)]);
    }

    #[test]
    fn only_mounts_of_csi_volumes_count() {
        let text = "20 1 254:0 / / rw - ext4 /dev/vda rw\n\
                    22 1 0:5 / /proc rw - proc proc rw\n\
                    90 1 8:1 /volumes/v /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount rw - xfs /dev/vdb rw\n\
                    91 1 0:5 /loop65536 /var/lib/kubelet/plugins/kubernetes.io/csi/b rw - devtmpfs dev rw\n";
        assert_eq!(
            all(csi_mounts(&mount_table::parse(text).unwrap())),
            [
                "mount of /volumes/v at /var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v/mount",
                "mount of a loop device at /var/lib/kubelet/plugins/kubernetes.io/csi/b",
            ]
        );
    }
}
