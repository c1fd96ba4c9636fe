//! The state that all parts of one run share: paths, progress, and cancellation.

use std::fs::File;
use std::io::Write;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::Flock;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, MutexGuard, Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

use crate::cache::{self, Cache};
use crate::progress::{Progress, StepTimes};
use crate::scratch::ScratchDir;
use crate::versions::Versions;

/// The file of the cache with the times of steps.
const STEP_TIMES: &str = "step-times";

/// The project whose programs run in the virtual machines.
#[derive(Clone, Copy, Debug)]
pub struct Project {
    /// The name of the cache directory, of clusters in kubeconfigs, and of the JUnit report. In upper case, it
    /// begins the names of environment variables.
    pub name: &'static str,
    /// The command line that starts this program, such as `cargo harness`, for messages with a command to paste.
    pub command: &'static str,
}

impl Project {
    /// Returns the name of an environment variable: `DISK_TOOL_ACCELERATOR` for `ACCELERATOR` of the project
    /// `disk-tool`.
    pub fn variable(&self, name: &str) -> String {
        format!("{}_{name}", self.name.to_uppercase().replace('-', "_"))
    }
}

/// One run of the program.
#[derive(Debug)]
pub struct Session {
    /// The project under test.
    pub project: Project,
    /// The directories of the project.
    pub workspace: Workspace,
    /// The artifacts that are built once.
    pub cache: Cache,
    /// The display of steps.
    pub progress: Progress,
    /// Cancelled by the first Ctrl-C. Long operations then start no new steps, and write a report.
    pub cancel: CancellationToken,
    /// The versions of what this session uses.
    pub versions: Versions,
    compiler: Mutex<()>,
    /// A permit for each processor.
    processors: Semaphore,
    /// The temporary files of this process, which are removed with the session.
    _scratch: ScratchDir,
}

impl Session {
    /// Begins a session, and removes what earlier runs left that were killed.
    pub fn new(project: Project, workspace: Workspace) -> Result<Session> {
        let cache = Cache::open(project.name)?;
        cache.remove_abandoned();
        Ok(Session::with_directories(project, workspace, cache, ScratchDir::of_this_process()?))
    }

    /// Begins a session with these directories, for tests.
    pub fn with_directories(
        project: Project,
        workspace: Workspace,
        cache: Cache,
        scratch: ScratchDir,
    ) -> Session {
        let progress = Progress::new(StepTimes::at(cache.root().join(STEP_TIMES)));
        Session {
            project,
            workspace,
            cache,
            progress,
            cancel: CancellationToken::new(),
            versions: Versions::default(),
            compiler: Mutex::new(()),
            processors: Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)),
            _scratch: scratch,
        }
    }

    /// Waits for a turn to compile with cargo, and keeps it until the guard is dropped. Two builds at the same time would wait for cargo's
    /// lock, and the wait would be part of the time of a step.
    pub async fn turn_to_compile(&self) -> MutexGuard<'_, ()> {
        self.compiler.lock().await
    }

    /// Waits for a processor of this machine that no virtual machine keeps busy, and keeps it until the permit is dropped. With more
    /// machines than processors, those that wait for each other inside use up the time: three on two processors took twice as long.
    pub async fn processor(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.processors.acquire().await.ok()
    }

    /// Records the exact versions that belong to `what`, and prints `summary` if they are used for the first time.
    pub(crate) fn use_version(&self, what: &str, versions: Vec<String>, summary: &str) {
        if self.versions.record(what, versions) {
            self.progress.line(format!("version of {what}: {summary}"));
        }
    }

    /// Waits until no other run in this target directory writes the reports and logs of `name`, and locks them.
    ///
    /// # Errors
    /// The lock cannot be acquired, or the run was stopped while it waited.
    pub async fn exclusive(&self, name: &str) -> Result<Flock<File>> {
        let holder = match self.try_exclusive(name)? {
            Ok(lock) => return Ok(lock),
            Err(holder) => holder,
        };
        let step = self.progress.step(format!("wait for another {name} run, {holder}"));
        let lock = self.until_cancelled(cache::lock(&self.lock_path(name)?)).await?;
        self.name_holder(&lock)?;
        step.done("");
        Ok(lock)
    }

    /// Locks the reports and logs of `name` like [`Session::exclusive`], but does not wait for another run: if it holds the lock,
    /// the inner error is its process id, its command line and its checkout.
    pub fn try_exclusive(&self, name: &str) -> Result<Result<Flock<File>, String>> {
        let path = self.lock_path(name)?;
        if let Some(lock) = cache::try_lock(&path)? {
            self.name_holder(&lock)?;
            return Ok(Ok(lock));
        }
        let holder = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        // The holder locks the file before it writes its name.
        let holder = if holder.is_empty() { format!("the holder of {}", path.display()) } else { holder };
        Ok(Err(holder))
    }

    fn lock_path(&self, name: &str) -> Result<PathBuf> {
        let target = self.workspace.target();
        std::fs::create_dir_all(&target).with_context(|| format!("create {}", target.display()))?;
        Ok(target.join(format!(".harness-{name}.lock")))
    }

    /// Writes into a locked file which run holds it, for the messages of others.
    fn name_holder(&self, mut lock: &File) -> Result<()> {
        let (pid, args) = (std::process::id(), std::env::args().skip(1).collect::<Vec<_>>().join(" "));
        let (command, root) = (self.project.command, self.workspace.root().display());
        lock.set_len(0).context("empty a lock file")?;
        write!(lock, "process {pid} (`{command} {args}` of the checkout {root})").context("write a lock file")
    }

    /// Runs `work` until it ends or the session is cancelled. In the second case, `work` is dropped with
    /// everything it owns.
    ///
    /// # Errors
    /// The error of `work`, or that the run was stopped.
    pub fn until_cancelled<T>(
        &self,
        work: impl Future<Output = Result<T>>,
    ) -> impl Future<Output = Result<T>> {
        // On the heap: `work` may be a whole run, which would be part of the future of every caller.
        let work = Box::pin(work);
        async move {
            match self.cancel.run_until_cancelled(work).await {
                Some(result) => result,
                None => anyhow::bail!("the run was stopped"),
            }
        }
    }
}

/// The directories of a checkout of the project.
#[derive(Clone, Debug)]
pub struct Workspace {
    root: PathBuf,
    definitions: PathBuf,
}

impl Workspace {
    /// Creates a value for the cargo workspace at `root`. `definitions` is the directory of the data that
    /// describes images: package lists, kernels, pinned versions.
    pub fn new(root: PathBuf, definitions: PathBuf) -> Workspace {
        Workspace { root, definitions }
    }

    /// Returns the directory of the cargo workspace.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of the data that describes images: package lists, kernels, pinned versions.
    pub fn definitions(&self) -> &Path {
        &self.definitions
    }

    /// Reads a file in TOML of the definitions.
    pub fn definition<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let path = self.definitions.join(path);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("parse {}", path.display()))
    }

    /// Returns cargo's target directory.
    pub fn target(&self) -> PathBuf {
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| self.root.join("target"), PathBuf::from)
    }

    /// Returns the directory of the reports and logs of the run `name`.
    pub fn reports(&self, name: &str) -> PathBuf {
        self.target().join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message has the process and its checkout.
    #[test]
    fn refused_run_reports_lock_holder() {
        let dir = tempfile::tempdir().unwrap();
        let session = Session::with_directories(
            Project { name: "disk-tool", command: "cargo xtask" },
            Workspace::new(dir.path().to_owned(), dir.path().to_owned()),
            Cache::at(dir.path().join("cache")).unwrap(),
            ScratchDir::create(dir.path()).unwrap(),
        );
        // CARGO_TARGET_DIR may lead to a directory that other runs of this test share.
        let name = format!("test-{}", std::process::id());
        let lock = session.try_exclusive(&name).unwrap().unwrap();
        let holder = session.try_exclusive(&name).unwrap().unwrap_err();
        let expected = [format!("process {} ", std::process::id()), dir.path().display().to_string()];
        assert!(expected.iter().all(|part| holder.contains(part)), "{holder}");
        drop(lock);
        session.try_exclusive(&name).unwrap().unwrap();
        std::fs::remove_file(session.lock_path(&name).unwrap()).unwrap();
    }
}
