//! `/proc/thread-self/mountinfo` (proc(5)): the mounts in the mount namespace of a thread.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::statx;
use crate::units::DeviceNumber;

/// The table of the thread. `/proc/self` has that of the main thread, which may be in another mount namespace.
const TABLE: &str = "/proc/thread-self/mountinfo";

/// One mounted file system, or part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mount {
    /// Unique while mounted; may be used again after.
    pub id: u64,
    /// The mount this one is on.
    pub parent: u64,
    /// `st_dev` of files here.
    pub device: DeviceNumber,
    /// The path within the file system that is the root of this mount.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Options of this mount, such as `ro` and `nosuid`.
    pub options: Vec<String>,
    /// Propagation fields, such as `shared:1`.
    pub propagation: Vec<String>,
    /// Type of the file system.
    pub fs_type: String,
    /// Source, such as a block device.
    pub source: PathBuf,
    /// Options of the file system as a whole, such as `prjquota`.
    pub super_options: Vec<String>,
}

impl Mount {
    /// Returns `true` if the mount (not only the file system) has this option.
    #[must_use]
    pub fn has_option(&self, name: &str) -> bool {
        self.options.iter().any(|option| option == name)
    }
}

/// Reads the table of the mount namespace of this thread.
///
/// # Errors
/// ENOENT where `/proc` is not mounted.
pub fn read() -> Result<Vec<Mount>> {
    parse(&std::fs::read(TABLE).context("read", TABLE)?)
}

/// Returns the mount through which a file was opened (statx(2), Linux 5.8). Unlike a comparison of paths, it finds that mount also
/// if the path has a symbolic link, or if a later mount covers an earlier one. Returns `None` if the table does not have it.
#[must_use]
pub fn holding(mounts: &[Mount], file: impl AsFd) -> Option<&Mount> {
    let id = statx::mount_id(file).ok()??;
    mounts.iter().find(|mount| mount.id == id)
}

/// The topmost mount at `path` itself (a later line covers an earlier one).
#[must_use]
pub fn at<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().rev().find(|mount| mount.mount_point == path)
}

/// Parses the text of the table.
///
/// # Errors
/// [`ErrorKind::Other`] with the line that is not of the documented form.
pub fn parse(table: &[u8]) -> Result<Vec<Mount>> {
    let lines = table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                let line = String::from_utf8_lossy(line);
                Error::new(ErrorKind::Other, "parse", TABLE, format!("not of the documented form: {line}"))
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut text = || fields.next().map(|field| String::from_utf8_lossy(field).into_owned());
    let id = text()?.parse().ok()?;
    let parent = text()?.parse().ok()?;
    let device = text()?.parse().ok()?;
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let options = list(fields.next()?);
    let mut propagation = Vec::new();
    loop {
        match fields.next()? {
            b"-" => break,
            field => propagation.push(String::from_utf8_lossy(field).into_owned()),
        }
    }
    let fs_type = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    let super_options = list(fields.next()?);
    Some(Mount {
        id,
        parent,
        device,
        root,
        mount_point,
        options,
        propagation,
        fs_type,
        source,
        super_options,
    })
}

fn list(field: &[u8]) -> Vec<String> {
    field.split(|byte| *byte == b',').map(|option| String::from_utf8_lossy(option).into_owned()).collect()
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal =
            tail.get(..3).filter(|digits| first == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        match octal {
            Some(digits) => {
                bytes.push(
                    digits.iter().fold(0u8, |value, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')),
                );
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &[u8] = b"\
26 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
40 26 254:16 / /var/lib/loopfs/data rw,nosuid,nodev,noexec shared:7 master:2 - xfs /dev/vdb rw,prjquota\n\
41 26 0:6 /loop65536 /pods/a\\040b rw - devtmpfs udev rw,size=4k\n";

    #[test]
    fn the_documented_fields_are_read() {
        let mounts = parse(TEXT).unwrap();
        assert_eq!(mounts.len(), 3);
        let data = at(&mounts, Path::new("/var/lib/loopfs/data")).unwrap();
        assert_eq!((data.id, data.parent), (40, 26));
        assert!(data.has_option("nodev") && !data.has_option("ro"));
        assert_eq!(data.propagation, ["shared:7", "master:2"]);
        assert_eq!(data.super_options, ["rw", "prjquota"]);
        let device = at(&mounts, Path::new("/pods/a b")).unwrap();
        assert_eq!(device.root, Path::new("/loop65536"));
        assert!(device.propagation.is_empty());
    }

    #[test]
    fn a_later_mount_covers_earlier_ones() {
        let twice = [TEXT, b"50 40 254:16 /x /var/lib/loopfs/data ro - xfs /dev/vdb rw\n"].concat();
        let mounts = parse(&twice).unwrap();
        assert_eq!(at(&mounts, Path::new("/var/lib/loopfs/data")).unwrap().id, 50);
    }

    #[test]
    fn symbolic_links_lead_to_their_mount() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/proc/self", &link).unwrap();
        let mounts = read().unwrap();
        let mount = holding(&mounts, std::fs::File::open(&link).unwrap()).unwrap();
        assert_eq!((mount.mount_point.as_path(), mount.fs_type.as_str()), (Path::new("/proc"), "proc"));
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail(table in proptest::collection::vec(any::<u8>(), 0..300)) {
            drop(parse(&table));
        }
    }
}
