//! The state that all parts of one run share: paths, progress, and cancellation.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::Flock;
use tokio_util::sync::CancellationToken;

use crate::cache::{self, Cache};
use crate::progress::Progress;

/// One invocation of the harness.
#[derive(Debug)]
pub struct Session {
    pub workspace: Workspace,
    pub cache: Cache,
    pub progress: Progress,
    /// Cancelled by the first Ctrl-C. Long operations then start no new steps, and write a report.
    pub cancel: CancellationToken,
}

impl Session {
    /// # Errors
    /// The workspace or the cache directory cannot be found.
    pub fn new() -> Result<Session> {
        Ok(Session {
            workspace: Workspace::find()?,
            cache: Cache::open()?,
            progress: Progress::new(),
            cancel: CancellationToken::new(),
        })
    }

    /// Waits until no other run in this checkout writes the reports and logs of `name`, and locks them.
    ///
    /// # Errors
    /// The lock cannot be acquired, or the run was stopped while it waited.
    pub async fn exclusive(&self, name: &str) -> Result<Flock<File>> {
        let target = self.workspace.target();
        std::fs::create_dir_all(&target).with_context(|| format!("create {}", target.display()))?;
        let path = target.join(format!(".harness-{name}.lock"));
        if let Some(lock) = cache::try_lock(&path)? {
            return Ok(lock);
        }
        let step = self.progress.step(format!("wait for another {name} run in this checkout"));
        let lock = self.until_cancelled(cache::lock(&path)).await?;
        step.done("");
        Ok(lock)
    }

    /// Runs `work` until it ends or the session is cancelled. In the second case, `work` is dropped with
    /// everything it owns.
    ///
    /// # Errors
    /// The error of `work`, or that the run was stopped.
    pub async fn until_cancelled<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match self.cancel.run_until_cancelled(work).await {
            Some(result) => result,
            None => anyhow::bail!("stopped before it ended"),
        }
    }
}

/// The checkout from which this harness was built.
#[derive(Clone, Debug)]
pub struct Workspace {
    root: PathBuf,
}

impl Workspace {
    fn find() -> Result<Workspace> {
        // Cargo sets this for `cargo run`. The compiled-in value is for a binary that is started directly.
        let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest_dir.parent().context("the harness crate has no parent directory")?;
        anyhow::ensure!(
            root.join("vm-images").is_dir(),
            "{} is not a loopfs checkout (it has no vm-images directory); run from one by `cargo harness`",
            root.display()
        );
        Ok(Workspace { root: root.to_owned() })
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of the data that describes images: package lists, kernels, pinned versions.
    #[must_use]
    pub fn vm_images(&self) -> PathBuf {
        self.root.join("vm-images")
    }

    /// Returns cargo's target directory.
    #[must_use]
    pub fn target(&self) -> PathBuf {
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| self.root.join("target"), PathBuf::from)
    }

    /// Returns the directory of the reports and logs of the run `name`. Each run recreates it.
    #[must_use]
    pub fn reports(&self, name: &str) -> PathBuf {
        self.target().join(name)
    }
}
