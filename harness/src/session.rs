//! What every part of one run shares: where things are, how progress is shown, and whether to stop.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::progress::Progress;

/// One invocation of the harness.
#[derive(Debug)]
pub struct Session {
    pub workspace: Workspace,
    pub cache: Cache,
    pub progress: Progress,
    /// Cancelled by the first Ctrl-C. Long work stops starting new steps, and leaves a report.
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

    /// Runs `work` unless and until the session is cancelled; what `work` owns is then dropped.
    ///
    /// # Errors
    /// What `work` returns, or that the run was stopped.
    pub async fn until_cancelled<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match self.cancel.run_until_cancelled(work).await {
            Some(result) => result,
            None => anyhow::bail!("stopped before it ended"),
        }
    }
}

/// The checkout this harness was built from.
#[derive(Clone, Debug)]
pub struct Workspace {
    root: PathBuf,
}

impl Workspace {
    fn find() -> Result<Workspace> {
        // Cargo sets this for `cargo run`; the value compiled in serves a binary started by hand.
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

    /// Data that describes images: package lists, kernels, pins.
    #[must_use]
    pub fn vm_images(&self) -> PathBuf {
        self.root.join("vm-images")
    }

    /// Cargo's target directory.
    #[must_use]
    pub fn target(&self) -> PathBuf {
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| self.root.join("target"), PathBuf::from)
    }

    /// Where the reports and logs of a run named `name` go. Made anew by whoever runs it.
    #[must_use]
    pub fn reports(&self, name: &str) -> PathBuf {
        self.target().join(name)
    }
}
