//! The exact versions of the programs, packages and kernels that a session uses: two machines that test different ones
//! have different reports.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};

/// The versions by what they belong to, such as `kernel trixie`. Each line is a name and a version.
pub type Used = BTreeMap<String, Vec<String>>;

/// The versions that a session has used so far.
#[derive(Debug, Default)]
pub struct Versions {
    used: Mutex<Used>,
    newest: AtomicBool,
}

impl Versions {
    /// Records the versions of `what`. Returns `false` if they were recorded before.
    pub(crate) fn record(&self, what: &str, lines: Vec<String>) -> bool {
        self.used().insert(what.to_owned(), lines).is_none()
    }

    /// Returns the versions that were recorded so far.
    pub fn all(&self) -> Used {
        self.used().clone()
    }

    /// Has the session move to the newest versions of the distribution's packages, rather than use the cached ones.
    pub fn look_for_newest(&self) {
        self.newest.store(true, Ordering::Relaxed);
    }

    /// Returns `true` after [`look_for_newest`](Versions::look_for_newest).
    pub fn newest(&self) -> bool {
        self.newest.load(Ordering::Relaxed)
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the versions as text: a paragraph for each kind, which is also what `diff` compares best.
pub fn write(used: &Used, path: &Path) -> Result<()> {
    let paragraph = |(what, lines): (&String, &Vec<String>)| format!("{what}:\n  {}\n", lines.join("\n  "));
    let text = used.iter().map(paragraph).collect::<String>();
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
