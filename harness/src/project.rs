//! The project that this harness tests: loopfs, in the checkout from which the harness was built.

use std::path::PathBuf;

use anyhow::{Context, Result};
use testvm::session::{Project, Session, Workspace};

const LOOPFS: Project = Project { name: "loopfs", command: "cargo harness" };

/// Begins a session in this checkout.
///
/// # Errors
/// The checkout or the cache directory cannot be found.
pub(crate) fn session() -> Result<Session> {
    Session::new(LOOPFS, workspace()?)
}

/// Returns the directories of this checkout.
///
/// # Errors
/// The checkout cannot be found.
pub(crate) fn workspace() -> Result<Workspace> {
    // Cargo sets this for `cargo run`. The compiled-in value is for a binary that is started directly.
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = manifest_dir.parent().context("the harness crate has no parent directory")?;
    let definitions = root.join("vm-images");
    anyhow::ensure!(
        definitions.is_dir(),
        "{} is not a loopfs checkout (it has no vm-images directory); run from one by `cargo harness`",
        root.display()
    );
    Ok(Workspace::new(root.to_owned(), definitions))
}
