//! Programs and examples of crates, installed from the registry in a pinned version.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::Recipe;
use crate::process::Program;
use crate::rust_build;
use crate::session::Session;

/// A crate with a program of the same name.
#[derive(Clone, Copy, Debug)]
pub struct CargoTool {
    pub name: &'static str,
    /// The exact version.
    pub version: &'static str,
}

/// An example of a crate, for guests.
#[derive(Clone, Copy, Debug)]
pub struct CargoExample {
    pub name: &'static str,
    pub of: CargoTool,
}

impl CargoTool {
    /// Returns the path of the program from the cache, or compiles it.
    ///
    /// # Errors
    /// The crate cannot be fetched or does not compile.
    pub async fn prepare(&self, session: &Session) -> Result<PathBuf> {
        self.report(session);
        let recipe = Recipe::new(self.name, 1).with("version", self.version);
        let directory = session.cache.artifact(&recipe, async |directory: &Path| {
            let cargo = rust_build::program(session.workspace.root()).arg("install");
            self.install(session, cargo, directory).await
        });
        Ok(directory.await?.join("bin").join(self.name))
    }

    fn report(&self, session: &Session) {
        session.use_version(self.name, vec![format!("{} {}", self.name, self.version)], self.version);
    }

    /// Runs `cargo install`, to which it adds the arguments that are common to programs and examples.
    async fn install(&self, session: &Session, cargo: Program, directory: &Path) -> Result<()> {
        let step = session.progress.step(format!("install {} {}", self.name, self.version));
        let notes = step.notes();
        // Cargo's directories of the workspace keep what they compile, and this is compiled once.
        let scratch = tempfile::tempdir().context("create a temporary directory")?;
        cargo
            .args(["--locked", "--no-track", "--version"])
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

impl CargoExample {
    /// Returns the path of the example as a static program, from the cache, or compiles it.
    ///
    /// # Errors
    /// As [`CargoTool::prepare`].
    pub async fn prepare(&self, session: &Session) -> Result<PathBuf> {
        self.of.report(session);
        let recipe = Recipe::new(self.of.name, 1).with("version", self.of.version).with("example", self.name);
        let directory = session.cache.artifact(&recipe, async |directory: &Path| {
            let cargo = rust_build::static_program(session.workspace.root(), "install").await?;
            self.of.install(session, cargo.args(["--example", self.name]), directory).await
        });
        Ok(directory.await?.join("bin").join(self.name))
    }
}
