//! A shell for interactive pods: busybox, which has its commands built in.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::debian;
use crate::cache::Recipe;
use crate::session::Session;

const SUITE: &str = "trixie";
const PACKAGE: &str = "busybox-static";
const PROGRAM: &str = "usr/bin/busybox";

/// Returns a static busybox of Debian. If it is called `sh`, it runs its own commands without a file for
/// each.
///
/// # Errors
/// The package cannot be fetched.
pub async fn busybox(session: &Session) -> Result<PathBuf> {
    let recipe = Recipe::new("busybox", 1).with("suite", SUITE).with("package", PACKAGE);
    let directory = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            let step = session.progress.step("fetch busybox");
            let place = |path: &Path| (path == Path::new(PROGRAM)).then(|| path.to_owned());
            debian::extract(SUITE, PACKAGE, directory, place, step.notes()).await?;
            step.done("");
            Ok(())
        })
        .await?;
    Ok(directory.join(PROGRAM))
}
