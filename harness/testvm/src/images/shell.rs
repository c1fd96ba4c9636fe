//! A shell for interactive pods: busybox, which has its commands built in.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::debian::{EXTRACT, Selection};
use super::debian_versions::{unchecked, unpacked};
use crate::cache::Recipe;
use crate::session::Session;

const SUITE: &str = "trixie";
const PACKAGE: &str = "busybox-static";
const PROGRAM: &str = "usr/bin/busybox";

/// Returns a static busybox of Debian. If it is called `sh`, it runs its own commands without a file for
/// each.
pub async fn busybox(session: &Session) -> Result<PathBuf> {
    let packages = [PACKAGE.to_owned()];
    let selection = Selection::new(SUITE, EXTRACT, &packages);
    let place = |path: &Path| (path == Path::new(PROGRAM)).then(|| path.to_owned());
    let directory =
        unpacked(session, "busybox", &selection, Recipe::new("busybox", 2), place, unchecked).await?;
    Ok(directory.join(PROGRAM))
}
