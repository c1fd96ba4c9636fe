//! The mount table of a node (proc_pid_mountinfo(5)). A row that cannot be understood is an error, so that no mount is overlooked.

use anyhow::{Context, Result};

use super::node::Node;

/// A row of the mount table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Mounted {
    /// The device, as `MAJOR:MINOR`.
    pub device: String,
    /// The directory of the file system that is mounted.
    pub root: String,
    /// The mount point.
    pub target: String,
    /// The options of this mount.
    pub options: Vec<String>,
    /// The number of the peer group of a shared mount.
    pub peers: Option<String>,
}

/// Returns all mounts of the node at this moment.
///
/// # Errors
/// The node cannot be reached, or a row of the table cannot be understood.
pub async fn mounts(node: &Node) -> Result<Vec<Mounted>> {
    parse(&node.output(&["cat", "/proc/self/mountinfo"]).await?)
}

/// Parses a mount table.
///
/// # Errors
/// The message quotes a row that cannot be understood. Every process has a root, so a table without it is an error, too.
pub fn parse(text: &str) -> Result<Vec<Mounted>> {
    let row = |line: &str| row(line).with_context(|| format!("mountinfo has {line:?}"));
    let mounts = text.lines().map(row).collect::<Result<Vec<_>>>()?;
    anyhow::ensure!(mounts.iter().any(|mount| mount.target == "/"), "mountinfo has no mount at /: {text:?}");
    Ok(mounts)
}

/// Parses `ID PARENT MAJOR:MINOR ROOT TARGET OPTIONS [FIELD..] - TYPE SOURCE OPTIONS`.
fn row(line: &str) -> Option<Mounted> {
    let words: Vec<&str> = line.split(' ').collect();
    let &[id, parent, device, root, target, options, ref rest @ ..] = words.as_slice() else { return None };
    let (major, minor) = device.split_once(':')?;
    let numbers = [id, parent, major, minor];
    let separator = rest.iter().position(|word| *word == "-")?;
    let (fields, file_system) = rest.split_at(separator);
    // The options of a file system can contain spaces.
    let complete = file_system.len() >= 4 && target.starts_with('/') && !root.is_empty();
    if !complete || numbers.iter().any(|number| number.parse::<u32>().is_err()) {
        return None;
    }
    Some(Mounted {
        device: device.to_owned(),
        root: root.to_owned(),
        target: target.to_owned(),
        options: options.split(',').map(str::to_owned).collect(),
        peers: fields.iter().find_map(|field| field.strip_prefix("shared:").map(str::to_owned)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "1 1 254:0 / / rw - ext4 /dev/vda rw\n";

    fn last(line: &str) -> Result<Mounted> {
        Ok(parse(&format!("{ROOT}{line}\n"))?.pop().unwrap())
    }

    #[test]
    fn mount_is_parsed_with_peer_group() {
        let line = "90 1 8:1 /kubelet /var/lib/kubelet rw,nodev master:3 shared:7 - xfs /dev/vdb rw,prjquota";
        let mount = last(line).unwrap();
        let fields = [&mount.device, &mount.root, &mount.target].map(String::as_str);
        assert_eq!(fields, ["8:1", "/kubelet", "/var/lib/kubelet"]);
        assert_eq!((mount.options.join(","), mount.peers.as_deref()), ("rw,nodev".to_owned(), Some("7")));
        let private = last("90 1 8:1 / /a rw - xfs /dev/vdb rw,shared:9").unwrap();
        assert_eq!(private.peers, None);
    }

    /// They have a namespace, an empty source or options with spaces.
    #[test]
    fn unusual_mount_rows_are_parsed() {
        for line in [
            "90 1 0:4 net:[4026531840] /run/netns/a rw shared:5 - nsfs nsfs rw",
            "91 1 0:40 / /tmp rw -  tmpfs  rw",
            "92 1 0:41 / /b rw - overlay overlay rw,lowerdir=/a b",
        ] {
            assert!(last(line).is_ok(), "{line}");
        }
    }

    #[test]
    fn malformed_row_is_quoted_in_error() {
        for line in [
            "",
            "90 1 8:1",
            "x 1 8:1 / /a rw - xfs /dev/vdb rw",
            "90 1 sda1 / /a rw - xfs /dev/vdb rw",
            "90 1 8:1 / /a rw xfs /dev/vdb rw",
            "90 1 8:1 / /a rw - xfs",
            "90 1 8:1 / a rw - xfs /dev/vdb rw",
        ] {
            let error = last(line).unwrap_err().to_string();
            assert!(error.contains(&format!("{line:?}")), "{error}");
        }
    }

    #[test]
    fn table_without_root_is_refused() {
        assert!(parse("").unwrap_err().to_string().contains("no mount at /"));
    }
}
