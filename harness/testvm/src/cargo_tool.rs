//! Programs of crates, installed from the registry in a pinned version.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::Recipe;
use crate::rust_build;
use crate::session::Session;

/// A crate with a program of the same name.
#[derive(Clone, Copy, Debug)]
pub struct CargoTool {
    pub name: &'static str,
    /// The exact version.
    pub version: &'static str,
}

impl CargoTool {
    /// Returns the path of the program from the cache, or compiles it.
    ///
    /// # Errors
    /// The crate cannot be fetched or does not compile.
    pub async fn prepare(&self, session: &Session) -> Result<PathBuf> {
        session.use_version(self.name, vec![format!("{} {}", self.name, self.version)], self.version);
        let recipe = Recipe::new(self.name, 1).with("version", self.version);
        let directory =
            session.cache.artifact(&recipe, async |directory: &Path| self.install(session, directory).await);
        Ok(directory.await?.join("bin").join(self.name))
    }

    async fn install(&self, session: &Session, directory: &Path) -> Result<()> {
        let step = session.progress.step(format!("install {} {}", self.name, self.version));
        let notes = step.notes();
        // Cargo's directories of the workspace keep what they compile, and this is compiled once.
        let scratch = tempfile::tempdir().context("create a temporary directory")?;
        rust_build::program(session.workspace.root())
            .args(["install", "--locked", "--no-track", "--version"])
            .arg(format!("={}", self.version))
            .arg("--root")
            .arg(directory)
            .arg(self.name)
            .env("CARGO_TARGET_DIR", scratch.path())
            .env("CARGO_BUILD_BUILD_DIR", scratch.path())
            .on_stderr_line(move |line| notes.note(line.trim().to_owned()))
            .run()
            .await?;
        step.done("");
        Ok(())
    }
}
