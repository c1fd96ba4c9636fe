//! The sources that a release is built from, and their version.

use std::path::{Path, PathBuf};

use anyhow::Result;
use testvm::process::git;
use testvm::session::Session;

/// The version of the workspace, in which this program was compiled.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The sources of an image.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The directory of the workspace.
    pub(crate) root: PathBuf,
    /// The directory of what is built, which no build of other sources uses.
    pub(crate) target_dir: PathBuf,
    /// The commit, if the sources are those of a commit.
    pub(crate) revision: Option<String>,
}

/// Returns the sources of this checkout. They have a revision if they do not differ from the commit.
///
/// # Errors
/// The repository has no commit.
pub(crate) async fn checkout(session: &Session) -> Result<Sources> {
    let root = session.workspace.root().to_owned();
    let revision = match changed_files(&root).await {
        Ok(changed) if changed.is_empty() => {
            Some(git(&root).args(["rev-parse", "HEAD"]).run().await?.stdout.trim().to_owned())
        }
        // Sources without a repository can be built, too.
        _ => None,
    };
    Ok(Sources { root, target_dir: session.workspace.target().join("image/build"), revision })
}

/// Returns the files that differ from the commit, as `git status` prints them.
///
/// # Errors
/// The directory is not in a Git repository.
pub(crate) async fn changed_files(root: &Path) -> Result<Vec<String>> {
    let status = git(root).args(["status", "--porcelain"]).run().await?.stdout;
    Ok(status.lines().map(str::to_owned).collect())
}
