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
    pub async fn prepare(&self, session: &Session) -> Result<PathBuf> {
        let CargoTool { name, version } = *self;
        session.use_version(name, vec![format!("{name} {version}")], version);
        let recipe = Recipe::new(name, 1).with("version", version);
        let directory = session.cache.artifact(&recipe, async |directory: &Path| {
            let step = session.progress.step(format!("install {name} {version}"));
            // Cargo's directories of the workspace keep what they compile, and this is compiled once.
            let scratch = tempfile::tempdir().context("create a temporary directory")?;
            rust_build::program(session.workspace.root())
                .args(["install", "--locked", "--no-track", "--version"])
                .arg(format!("={version}"))
                .arg("--root")
                .arg(directory)
                .arg(name)
                // Some of these crates ask for fat LTO, which takes longer than their programs run.
                .env("CARGO_PROFILE_RELEASE_LTO", "off")
                .env("CARGO_TARGET_DIR", scratch.path())
                .env("CARGO_BUILD_BUILD_DIR", scratch.path())
                .on_stderr_line(step.line_notes())
                .run()
                .await?;
            step.done("");
            Ok(())
        });
        Ok(directory.await?.join("bin").join(name))
    }
}
