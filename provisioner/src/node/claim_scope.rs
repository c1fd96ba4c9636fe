//! The claims that a node watches: those with its own label, or all of the cluster.
//!
//! `docs/decisions/0078-claim-labels.md` gives the reasons.

use std::sync::atomic::{AtomicBool, Ordering};

use kube::runtime::watcher;
use tokio::sync::watch;

use crate::objects::identity::Identity;

/// The claims that a node watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimScope {
    /// The claims with the label of this node.
    Own,
    /// All claims of the cluster.
    All,
}

impl ClaimScope {
    /// Returns the options of a watch with this scope.
    pub(crate) fn watcher_config(self, identity: &Identity) -> watcher::Config {
        match self {
            Self::Own => watcher::Config::default().labels(&identity.node_selector(identity.node())),
            Self::All => watcher::Config::default(),
        }
    }
}

/// The scope that holds now. It is `None` until the process has read the ConfigMap.
#[derive(Debug)]
pub(crate) struct CurrentScope {
    scope: watch::Sender<Option<ClaimScope>>,
    has_been_own: AtomicBool,
}

impl Default for CurrentScope {
    fn default() -> Self {
        CurrentScope { scope: watch::Sender::new(None), has_been_own: AtomicBool::new(false) }
    }
}

impl CurrentScope {
    pub(crate) fn set(&self, scope: ClaimScope) {
        self.has_been_own.fetch_or(scope == ClaimScope::Own, Ordering::Relaxed);
        let changed = self.scope.send_if_modified(|current| current.replace(scope) != Some(scope));
        match scope {
            ClaimScope::Own if changed => tracing::info!("this node watches only the claims with its label"),
            ClaimScope::All if changed => tracing::info!("this node watches all claims of the cluster"),
            _ => {}
        }
    }

    pub(crate) fn get(&self) -> Option<ClaimScope> {
        *self.scope.borrow()
    }

    /// Returns `true` if the cache may lack a claim of this node that has lost its label. After a change of the scope, the cache lags behind.
    pub(crate) fn may_hide_claims(&self) -> bool {
        self.has_been_own.load(Ordering::Relaxed)
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<ClaimScope>> {
        self.scope.subscribe()
    }
}
