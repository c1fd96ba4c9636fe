//! The Lease, which one replica holds at a time.
//!
//! Two replicas may believe for a while that they lead: one that cannot reach the API server, until its request times out, and two that
//! take over an expired Lease at the same moment, until the next renewal. This does no harm, because each selection and deletion is
//! conditional on the object being unchanged since the decision.
//!
//! The replicas compare the times in the Lease with their own clocks, which must agree within seconds.

use std::time::Duration;

use kube::Client;
use kube_lease_manager::{LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// The name of the Lease, which the role of the manifests names too.
const NAME: &str = "loopfs-controller";

/// Another replica leads this many seconds after the leader last renewed the Lease.
const DURATION_SECONDS: u64 = 15;
/// The leader renews the Lease this many seconds before it ends.
const RENEWAL_SECONDS: u64 = 10;

/// A replica that does not lead reads the Lease again after this time. It observes that the leader released the Lease, or that an
/// administrator deleted it.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);
/// Wait after the first error of the API server while this replica leads.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Wait after a further error.
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
/// replica leads within [`REREAD_INTERVAL`].
pub(crate) async fn compete(
    client: Client,
    candidate: Candidate,
    leads: watch::Sender<bool>,
    stop: CancellationToken,
) {
    // One failed request does not end the lead, because the duties would start again. The Lease is still valid for long enough.
    let mut tolerates_error = false;
    while !stop.is_cancelled() {
        let Err(error) = compete_once(&client, &candidate, &leads, &mut tolerates_error, &stop).await else {
            set(&leads, false);
            continue;
        };
        let pause = if tolerates_error { FIRST_RETRY } else { RETRY_INTERVAL };
        if !tolerates_error {
            set(&leads, false);
        }
        tolerates_error = false;
        let namespace = &candidate.namespace;
        tracing::warn!(
            %error,
            leads = *leads.borrow(),
            "could not hold Lease {namespace}/{NAME}; the next attempt follows in {pause:?}"
        );
        stop.run_until_cancelled(sleep(pause)).await;
    }
}

/// Reads the Lease, or creates it, and competes for it: until shutdown or an error, and without the Lease for [`REREAD_INTERVAL`].
async fn compete_once(
    client: &Client,
    candidate: &Candidate,
    leads: &watch::Sender<bool>,
    tolerates_error: &mut bool,
    stop: &CancellationToken,
) -> Result<(), LeaseManagerError> {
    let manager = LeaseManagerBuilder::new(client.clone(), NAME)
        .with_namespace(&candidate.namespace)
        .with_identity(&candidate.holder)
        .with_duration(DURATION_SECONDS)
        .with_grace(RENEWAL_SECONDS);
    let Some(manager) = stop.run_until_cancelled(manager.build()).await.transpose()? else { return Ok(()) };
    let mut holds = false;
    loop {
        tokio::select! {
            changed = manager.changed() => {
                holds = changed?;
                *tolerates_error = holds;
                set(leads, holds);
            }
            () = sleep(REREAD_INTERVAL), if !holds => return Ok(()),
            () = stop.cancelled() => return if holds { manager.release().await } else { Ok(()) },
        }
    }
}

fn set(leads: &watch::Sender<bool>, leads_now: bool) {
    leads.send_if_modified(|leads| std::mem::replace(leads, leads_now) != leads_now);
}
