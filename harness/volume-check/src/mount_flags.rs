//! The flags of a mount that a StorageClass or a pod can request.

use std::fs;
use std::path::Path;

use nix::sys::statvfs::FsFlags;

use crate::volume::{Checked, named};

/// Parses a list such as `nosuid,noexec`, or `none`.
pub(crate) fn parse(words: &str) -> Checked<FsFlags> {
    words.split(',').filter(|word| *word != "none").try_fold(FsFlags::empty(), |flags, word| {
        let flag = flag(word).filter(|flag| *flag != FsFlags::ST_RDONLY);
        Ok(flags | flag.ok_or_else(|| format!("{word:?} is not one of nosuid, nodev, noexec"))?)
    })
}

/// Returns the flags of the mount at `path`, from the mount table: statfs(2) returns none in a pod under gVisor.
pub(crate) fn of_mount(path: &Path) -> Checked<FsFlags> {
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(|e| named("read the mount table", e))?;
    in_table(&table, path).ok_or_else(|| format!("{} is not a mount point", path.display()).into())
}

/// Finds the last mount at `path`, which hides earlier ones.
fn in_table(table: &str, path: &Path) -> Option<FsFlags> {
    let options = table.lines().rev().find_map(|line| {
        let mut words = line.split(' ').skip(4);
        if Path::new(words.next()?) == path { words.next() } else { None }
    })?;
    Some(options.split(',').filter_map(flag).collect())
}

fn flag(word: &str) -> Option<FsFlags> {
    match word {
        "ro" => Some(FsFlags::ST_RDONLY),
        "nosuid" => Some(FsFlags::ST_NOSUID),
        "nodev" => Some(FsFlags::ST_NODEV),
        "noexec" => Some(FsFlags::ST_NOEXEC),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_flags_are_parsed() {
        assert_eq!(parse("nosuid,noexec").unwrap(), FsFlags::ST_NOSUID | FsFlags::ST_NOEXEC);
        assert_eq!(parse("none").unwrap(), FsFlags::empty());
        assert!(parse("nosuid,ro").is_err());
        assert!(parse("noexec,relatime").is_err());
    }

    #[test]
    fn last_mount_at_path_decides_flags() {
        let table = "30 1 0:20 / / rw - overlay none rw\n\
                     31 30 8:1 /a /vol rw,nosuid - xfs /dev/vdb rw,prjquota\n\
                     32 31 8:1 /b /vol ro,nodev,noexec,relatime shared:3 - xfs /dev/vdb rw,nosuid\n\
                     33 30 0:21 / /volume rw - tmpfs none rw\n";
        let found = |path: &str| in_table(table, Path::new(path));
        assert_eq!(found("/vol"), Some(FsFlags::ST_RDONLY | FsFlags::ST_NODEV | FsFlags::ST_NOEXEC));
        assert_eq!(found("/volume"), Some(FsFlags::empty()));
        assert_eq!(found("/vo"), None);
        assert_eq!(in_table("30 1\n", Path::new("/")), None);
    }
}
