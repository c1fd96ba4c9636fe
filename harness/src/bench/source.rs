//! The Git commit of the sources that are measured.

use std::path::Path;

use super::results::Source;

/// Returns the commit of the checkout at `root`. The commit is `None` if `root` is no checkout or Git is not installed.
pub(super) async fn of(root: &Path) -> Source {
    let output = async |args: &[&str]| {
        let finished = testvm::process::git(root).args(args.iter().copied()).finish().await.ok()?;
        finished.status.success().then_some(finished.stdout)
    };
    let commit = output(&["rev-parse", "HEAD"]).await.map(|commit| commit.trim().to_owned());
    let changes = output(&["status", "--porcelain", "--untracked-files=no"]).await;
    Source { commit, has_changes: changes.is_some_and(|changes| !changes.is_empty()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_directory_without_a_repository_has_no_commit() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(of(directory.path()).await, Source::default());
    }
}
