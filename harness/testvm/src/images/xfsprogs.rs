//! mkfs.xfs from the distribution's packages. The kernel tests format disks with it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::debian;
use crate::cache::Recipe;
use crate::session::Session;

const SUITE: &str = "trixie";
const PACKAGE: &str = "xfsprogs";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The program, its loader and its libraries, and their paths in the guest.
const FILES: [(&str, &str); 7] = [
    ("usr/sbin/mkfs.xfs", MKFS_XFS),
    ("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
    ("usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
    ("usr/lib/x86_64-linux-gnu/libblkid.so.1", "/usr/lib/x86_64-linux-gnu/libblkid.so.1"),
    ("usr/lib/x86_64-linux-gnu/libuuid.so.1", "/usr/lib/x86_64-linux-gnu/libuuid.so.1"),
    ("usr/lib/x86_64-linux-gnu/libinih.so.1", "/usr/lib/x86_64-linux-gnu/libinih.so.1"),
    ("usr/lib/x86_64-linux-gnu/liburcu.so.8", "/usr/lib/x86_64-linux-gnu/liburcu.so.8"),
];
/// The path of the program in the guest.
pub const MKFS_XFS: &str = "/usr/sbin/mkfs.xfs";

/// Returns the files that mkfs.xfs needs, from the cache or downloaded: the path in the guest and the path here.
///
/// # Errors
/// The package cannot be fetched.
pub async fn mkfs_xfs(session: &Session) -> Result<Vec<(&'static str, PathBuf)>> {
    let recipe = Recipe::new("mkfs-xfs", 1).with("suite", SUITE).with("package", PACKAGE);
    let directory = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            let step = session.progress.step("fetch mkfs.xfs of xfsprogs");
            debian::extract(SUITE, PACKAGE, directory, place, step.notes()).await?;
            step.done("");
            Ok(())
        })
        .await?;
    Ok(FILES.map(|(file, guest)| (guest, directory.join(file))).into())
}

/// Returns the paths of the program and of the libraries; the name of a library is a link to its file.
fn place(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let library = path.starts_with(LIBRARIES)
        && FILES.iter().filter_map(|(file, _)| file.rsplit('/').next()?.split(".so").next()).any(|stem| {
            stem != "mkfs.xfs" && name.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so"))
        });
    (path == Path::new(FILES[0].0) || library).then(|| path.to_owned())
}
