//! The Lease, which one replica holds at a time.
//!
//! A replica that cannot reach the API server believes for a while that it still leads, although another replica leads
//! already. This does no harm: it cannot write either, and each write of a duty is conditional on the object being unchanged since
//! the decision.

use std::time::Duration;

use kube::Client;
use kube_lease_manager::LeaseManagerBuilder;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

/// The name of the Lease, which the role of the manifests names too.
const NAME: &str = "loopfs-controller";

/// Another replica leads this many seconds after the leader last renewed the Lease.
const DURATION_SECONDS: u64 = 15;
/// The leader renews the Lease this many seconds before it ends.
const RENEWAL_SECONDS: u64 = 10;

/// Wait after an error of the API server.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Who competes for the Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// The namespace of the Lease.
    pub(crate) namespace: String,
    /// A name that no other replica has, such as that of the pod.
    pub(crate) holder: String,
}

/// Competes for the Lease until shutdown, and sets `leads` while this replica holds it. Releases it at the end, so that another
/// replica leads immediately.
pub(crate) async fn compete(
    client: Client,
    candidate: Candidate,
    leads: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let Candidate { namespace, holder } = candidate;
    let joining = async {
        loop {
            let manager = LeaseManagerBuilder::new(client.clone(), NAME)
                .with_namespace(&namespace)
                .with_identity(&holder)
                .with_duration(DURATION_SECONDS)
                .with_grace(RENEWAL_SECONDS);
            match manager.build().await {
                Ok(manager) => return manager,
                Err(error) => tracing::warn!(
                    %error,
                    "could not read Lease {namespace}/{NAME}; the next attempt follows in {RETRY_INTERVAL:?}"
                ),
            }
            sleep(RETRY_INTERVAL).await;
        }
    };
    let Some(manager) = stop.run_until_cancelled(joining).await else { return };
    let (mut holds, competing) = manager.watch().await;
    let reporting = async {
        loop {
            leads.send_replace(*holds.borrow_and_update());
            // An error means that the task which competes has ended.
            if holds.changed().await.is_err() {
                return;
            }
        }
    };
    stop.run_until_cancelled(reporting).await;
    leads.send_replace(false);
    // The task releases the Lease when nothing waits for its state any more.
    drop(holds);
    match competing.await {
        Ok(Ok(_manager)) => {}
        Ok(Err(error)) => tracing::warn!(%error, "could not release Lease {namespace}/{NAME}"),
        Err(error) => tracing::error!(%error, "the task that competes for Lease {namespace}/{NAME} failed"),
    }
}
