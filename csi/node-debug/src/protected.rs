//! Directories that only root and the user of this process can change.
//!
//! The service runs as root. If another user could change the directory of its socket, that user could put a symbolic link in the place
//! of a file whose mode the service changes, or listen in the place of the service.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use nix::unistd::geteuid;

/// Returns `path` with the real path of its directory, in which no other user can put or replace a file. Creates the directory with
/// mode 0700 if it does not exist.
///
/// # Errors
/// Another user can change the directory or one above it, or it cannot be created.
pub(crate) fn path(path: &Path) -> anyhow::Result<PathBuf> {
    let name = path.file_name().with_context(|| format!("{} names no file", path.display()))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    let existing = directory.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"));
    let parent = real_and_protected(existing)?;
    let missing = directory.strip_prefix(existing)?;
    let created = DirBuilder::new().recursive(true).mode(0o700).create(parent.join(missing));
    created.with_context(|| format!("create {}", directory.display()))?;
    Ok(real_and_protected(directory)?.join(name))
}

/// Returns the real path of a directory, after checking it and those above it.
fn real_and_protected(directory: &Path) -> anyhow::Result<PathBuf> {
    let real = fs::canonicalize(directory).with_context(|| format!("open {}", directory.display()))?;
    let this_user = geteuid().as_raw();
    for (distance, ancestor) in real.ancestors().enumerate() {
        let metadata =
            fs::symlink_metadata(ancestor).with_context(|| format!("stat {}", ancestor.display()))?;
        let (mode, owner) = (metadata.mode(), metadata.uid());
        let is_ok = is_protected(mode, owner, this_user)
            || (distance > 0 && keeps_entries(mode) && is_trusted(owner, this_user));
        ensure!(
            is_ok,
            "{}: other users can change this directory, and so could replace {}; use a directory that only its owner, root or \
             the user of node-debug, can write",
            ancestor.display(),
            real.display()
        );
    }
    Ok(real)
}

fn is_trusted(owner: u32, this_user: u32) -> bool {
    owner == 0 || owner == this_user
}

/// Returns `true` if only root and this user can change the entries of a directory.
fn is_protected(mode: u32, owner: u32, this_user: u32) -> bool {
    mode & 0o022 == 0 && is_trusted(owner, this_user)
}

/// Returns `true` if users can remove and rename only their own entries of a directory, such as `/tmp`.
fn keeps_entries(mode: u32) -> bool {
    mode & 0o1000 != 0
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::own_and_private(0o700, 7, true)]
    #[case::of_root(0o755, 0, true)]
    #[case::writable_by_a_group(0o770, 7, false)]
    #[case::writable_by_all(0o777, 0, false)]
    #[case::sticky(0o1777, 0, false)]
    #[case::of_another_user(0o700, 8, false)]
    fn directory_without_foreign_writers_is_protected(
        #[case] mode: u32,
        #[case] owner: u32,
        #[case] is_ok: bool,
    ) {
        assert_eq!(is_protected(mode, owner, 7), is_ok);
    }

    fn directory(path: &Path, mode: u32) -> &Path {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        path
    }

    #[rstest]
    #[case::writable_by_others(0o777, "a/socket", false)]
    #[case::in_a_directory_that_others_can_write(0o777, "a/new/socket", false)]
    #[case::sticky(0o1777, "a/socket", false)]
    #[case::to_be_created_in_a_sticky_directory(0o1777, "a/new/socket", false)]
    #[case::protected(0o755, "a/socket", true)]
    #[case::behind_a_link(0o755, "link/socket", true)]
    #[case::behind_a_link_that_others_can_replace(0o777, "a/link/socket", true)]
    fn a_path_needs_a_protected_directory(#[case] mode: u32, #[case] name: &str, #[case] is_ok: bool) {
        let scratch = tempfile::tempdir().unwrap();
        let a = scratch.path().join("a");
        directory(&a, 0o755);
        directory(&scratch.path().join("b"), 0o755);
        symlink(&a, scratch.path().join("link")).unwrap();
        symlink(scratch.path().join("b"), a.join("link")).unwrap();
        fs::set_permissions(&a, Permissions::from_mode(mode)).unwrap();
        let protected = path(&scratch.path().join(name));
        assert_eq!(protected.is_ok(), is_ok, "{protected:?}");
        assert_eq!(a.join("new").exists(), is_ok && name.contains("new"));
        // The result has no link that others could replace.
        if let Ok(directory) = protected.as_deref().map(|path| path.parent().unwrap()) {
            assert_eq!(directory.canonicalize().unwrap(), directory);
        }
    }
}
