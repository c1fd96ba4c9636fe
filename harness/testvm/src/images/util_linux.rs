//! losetup of util-linux from the distribution's packages. The kernel tests compare `loopfs losetup` with it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::debian;
use crate::cache::Recipe;
use crate::session::Session;

const SUITE: &str = "trixie";
const PACKAGE: &str = "mount";
/// The program, its loader and its libraries, and their paths in the guest.
const FILES: [(&str, &str); 4] = [
    ("usr/sbin/losetup", LOSETUP),
    ("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
    ("usr/lib/x86_64-linux-gnu/libsmartcols.so.1", "/usr/lib/x86_64-linux-gnu/libsmartcols.so.1"),
    ("usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
];
/// The path of the program in the guest.
pub const LOSETUP: &str = "/usr/sbin/losetup";

/// Returns the files that losetup needs, from the cache or downloaded: the path in the guest and the path here.
///
/// # Errors
/// The package cannot be fetched.
pub async fn losetup(session: &Session) -> Result<Vec<(&'static str, PathBuf)>> {
    let recipe = Recipe::new("losetup", 1).with("suite", SUITE).with("package", PACKAGE);
    let directory = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            let step = session.progress.step("fetch losetup of util-linux");
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
    let library = ["libsmartcols.so", "libc.so", "ld-linux"].iter().any(|prefix| name.starts_with(prefix));
    let wanted = path == Path::new(FILES[0].0) || (library && path.starts_with("usr/lib/x86_64-linux-gnu"));
    wanted.then(|| path.to_owned())
}
