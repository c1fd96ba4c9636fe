//! Artifacts that are built once: a directory per recipe, named by a hash of all its inputs.
//!
//! An artifact is complete or absent. It is built in a directory beside its final name, synced, and renamed.
//! A lock per artifact lets two runs share one build. The next run removes the directory that a killed run left.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

use crate::disk_space::{self, BUILD_MIB};

/// The end of the name of an artifact that is being built.
const BUILDING: &str = ".building";

/// The user's cache directory for a project.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens `$XDG_CACHE_HOME/NAME`, or `~/.cache/NAME`.
    pub fn open(name: &str) -> Result<Cache> {
        let set = std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = || std::env::home_dir().map(|home| home.join(".cache"));
        let base = set.or_else(home).context("neither XDG_CACHE_HOME nor HOME is set")?;
        Cache::at(base.join(name))
    }

    pub fn at(root: PathBuf) -> Result<Cache> {
        std::fs::create_dir_all(&root).with_context(|| format!("create the cache {}", root.display()))?;
        Ok(Cache { root })
    }

    /// Returns the directory of the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the artifact of `recipe`, or `None` if the cache does not have it.
    pub fn get(&self, recipe: &Recipe) -> Option<PathBuf> {
        Some(self.root.join(recipe.name()).join(recipe.key())).filter(|path| path.is_dir())
    }

    /// Returns the artifact of `recipe` from the cache. If it is missing, `build` creates it in an empty
    /// directory.
    ///
    /// # Errors
    /// An error of `build`, after which nothing is kept, or of the file system.
    pub async fn artifact<F>(&self, recipe: &Recipe, build: F) -> Result<PathBuf>
    where
        F: AsyncFnOnce(&Path) -> Result<()>,
    {
        if let Some(artifact) = self.get(recipe) {
            return Ok(artifact);
        }
        let parent = self.root.join(recipe.name());
        let target = parent.join(recipe.key());
        std::fs::create_dir_all(&parent).with_context(|| format!("create {}", parent.display()))?;
        // Another run may be building the same artifact.
        let _lock = lock(&parent.join(format!(".{}.lock", recipe.key()))).await?;
        if target.is_dir() {
            return Ok(target);
        }
        disk_space::require(&parent, BUILD_MIB).with_context(|| format!("build {}", recipe.name()))?;
        let building = parent.join(format!(".{}{BUILDING}", recipe.key()));
        // The lock proves that no live run is using this directory, so it can be removed.
        remove_dir(&building)?;
        std::fs::create_dir(&building).with_context(|| format!("create {}", building.display()))?;
        if let Err(error) = build(&building).await {
            // What cannot be removed stays: the next build of this artifact reports why.
            remove_dir(&building).ok();
            return Err(error.context(format!("build {}", recipe.name())));
        }
        publish(&building, &target).with_context(|| format!("keep {}", target.display()))?;
        Ok(target)
    }

    /// Removes the incomplete artifacts of runs that were killed. A run that builds holds the lock of its artifact. What
    /// cannot be removed stays: the next build of that artifact reports why.
    pub fn remove_abandoned(&self) {
        for path in entries(&self.root).iter().flat_map(|kind| entries(kind)) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some(key) = name.strip_prefix('.').and_then(|name| name.strip_suffix(BUILDING)) else {
                continue;
            };
            if let Ok(Some(_lock)) = try_lock(&path.with_file_name(format!(".{key}.lock"))) {
                remove_dir(&path).ok();
            }
        }
    }
}

/// Locks a file, and waits while another process holds the lock. The kernel releases the lock when its holder
/// ends.
pub async fn lock(path: &Path) -> Result<Flock<File>> {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || {
        Flock::lock(open_lock(&path)?, FlockArg::LockExclusive)
            .map_err(|(_, errno)| errno)
            .with_context(|| format!("lock {}", path.display()))
    })
    .await?
}

/// Locks a file like [`lock`], but returns `None` if another process holds the lock.
pub fn try_lock(path: &Path) -> Result<Option<Flock<File>>> {
    match Flock::lock(open_lock(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno).with_context(|| format!("lock {}", path.display())),
    }
}

/// Returns the paths in a directory, or none if it cannot be read.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}

fn open_lock(path: &Path) -> Result<File> {
    // The file is only locked, never truncated or removed.
    let mut options = File::options();
    options.create(true).truncate(false).write(true);
    options.open(path).with_context(|| format!("open the lock {}", path.display()))
}

/// All inputs of an artifact. Two recipes with the same inputs have the same artifact.
#[must_use]
#[derive(Clone, Debug)]
pub struct Recipe {
    name: String,
    hash: Sha256,
}

impl Recipe {
    /// Creates a recipe. `name` is a path component: the kind of artifact. Increase `version` when a change
    /// of the code changes what it builds.
    pub fn new(name: &str, version: u32) -> Recipe {
        Recipe { name: name.to_owned(), hash: Sha256::new() }.with("recipe version", version.to_string())
    }

    /// Adds one input with its label.
    pub fn with(mut self, label: &str, value: impl AsRef<[u8]>) -> Recipe {
        // The lengths distinguish ("ab", "c") from ("a", "bc").
        for part in [label.as_bytes(), value.as_ref()] {
            self.hash.update((part.len() as u64).to_le_bytes());
            self.hash.update(part);
        }
        self
    }

    /// Adds the content of a file.
    pub fn with_file(self, label: &str, path: &Path) -> Result<Recipe> {
        Ok(self.with(label, digest_file(path)?))
    }

    /// Adds another artifact, whose name is the hash of its inputs.
    pub fn with_artifact(self, label: &str, artifact: &Path) -> Recipe {
        self.with(label, artifact.file_name().unwrap_or_default().as_bytes())
    }

    /// Returns the kind of the artifact.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the hash of all inputs, in hexadecimal digits.
    pub fn key(&self) -> String {
        let digest = hex(&self.hash.clone().finalize());
        digest[..32].to_owned()
    }
}

/// Returns the SHA-256 of a file, in hexadecimal.
pub fn digest_file(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut hash = Sha256::new();
    std::io::copy(&mut file, &mut hash).with_context(|| format!("read {}", path.display()))?;
    Ok(hex(&hash.finalize()))
}

/// Returns the bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Syncs a new artifact and renames it to its final name, so that a crash leaves all of it or nothing.
fn publish(building: &Path, target: &Path) -> Result<()> {
    let parent = target.parent().context("an artifact has a parent")?;
    let directory = File::open(building)?;
    // One syncfs for any number of files. The largest artifacts have a few GB.
    nix::unistd::syncfs(&directory)?;
    std::fs::rename(building, target)?;
    File::open(parent)?.sync_all()?;
    Ok(())
}

/// Writes a file so that another process reads the old or the new content.
pub(crate) fn replace_file(path: &Path, text: &str, mode: u32) -> Result<()> {
    let replace = || -> Result<()> {
        let directory = path.parent().context("a file has a directory")?;
        let permissions = Permissions::from_mode(mode);
        let mut new = tempfile::Builder::new().permissions(permissions).tempfile_in(directory)?;
        new.write_all(text.as_bytes())?;
        new.persist(path)?;
        Ok(())
    };
    replace().with_context(|| format!("write {}", path.display()))
}

/// Removes a file. A missing file is not an error.
pub fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes a directory with its content. A missing directory is not an error.
pub fn remove_dir(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Creates a directory, and removes first what an earlier run left there.
pub fn empty_dir(path: &Path) -> Result<()> {
    remove_dir(path)?;
    std::fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().join("cache")).unwrap();
        (dir, cache)
    }

    #[tokio::test]
    async fn two_runs_share_one_build() {
        let (_dir, cache) = cache();
        let recipe = Recipe::new("thing", 1).with("input", "a");
        let builds = AtomicUsize::new(0);
        let build = || {
            cache.artifact(&recipe, async |dir: &Path| {
                builds.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(50)).await;
                std::fs::write(dir.join("file"), "content")?;
                Ok(())
            })
        };
        let (first, second) = tokio::join!(build(), build());
        assert_eq!(first.unwrap(), second.unwrap());
        assert_eq!(builds.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn failed_build_leaves_nothing() {
        let (_dir, cache) = cache();
        let recipe = Recipe::new("thing", 1);
        let failed = cache
            .artifact(&recipe, async |dir: &Path| {
                std::fs::write(dir.join("half"), "")?;
                anyhow::bail!("no network")
            })
            .await
            .unwrap_err();
        assert_eq!(format!("{failed:#}"), "build thing: no network");
        let path = cache.artifact(&recipe, async |_: &Path| Ok(())).await.unwrap();
        assert!(!path.join("half").exists());
    }

    /// A killed run left the artifact.
    #[tokio::test]
    async fn incomplete_artifact_is_not_used() {
        let (_dir, cache) = cache();
        let recipe = Recipe::new("thing", 1);
        let half = cache.root().join("thing").join(format!(".{}.building", recipe.key()));
        std::fs::create_dir_all(&half).unwrap();
        std::fs::write(half.join("half"), "").unwrap();
        let path = cache
            .artifact(&recipe, async |dir: &Path| Ok(std::fs::write(dir.join("whole"), "")?))
            .await
            .unwrap();
        assert!(path.join("whole").exists() && !path.join("half").exists());
    }

    /// Artifacts that a live run builds are kept.
    #[tokio::test]
    async fn abandoned_artifacts_are_removed() {
        let (_dir, cache) = cache();
        let half = |name: &str| cache.root().join("thing").join(name);
        for name in [".a.building", ".b.building", "complete"] {
            std::fs::create_dir_all(half(name)).unwrap();
        }
        let live = try_lock(&half(".b.lock")).unwrap();
        cache.remove_abandoned();
        assert!(!half(".a.building").exists() && half(".b.building").exists() && half("complete").exists());
        drop(live);
        cache.remove_abandoned();
        assert!(!half(".b.building").exists());
    }

    /// A byte that moves from one input to the next changes the key.
    #[test]
    fn key_depends_on_each_input_separately() {
        let key = |a: &str, b: &str| Recipe::new("thing", 1).with(a, b).key();
        assert_eq!(key("ab", "c"), key("ab", "c"));
        assert_ne!(key("ab", "c"), key("a", "bc"));
        assert_ne!(key("ab", "c"), Recipe::new("thing", 2).with("ab", "c").key());
    }
}
