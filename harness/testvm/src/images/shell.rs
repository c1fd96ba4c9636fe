//! A shell for interactive pods: busybox, which has its commands built in.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::debian::{self, Selection, Variant};
use super::debian_versions;
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
    let packages = [PACKAGE.to_owned()];
    let selection = Selection { suite: SUITE, variant: Variant::Extract, packages: &packages, options: &[] };
    let build = async |directory: &Path| -> Result<()> {
        let step = session.progress.step("fetch busybox");
        let place = |path: &Path| (path == Path::new(PROGRAM)).then(|| path.to_owned());
        debian::extract(&selection, directory, place, step.notes()).await?;
        step.done("");
        Ok(())
    };
    let recipe = Recipe::new("busybox", 2);
    let directory = debian_versions::artifact(session, "busybox", &selection, recipe, build).await?;
    Ok(directory.join(PROGRAM))
}
