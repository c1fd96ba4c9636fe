//! Follows the state of the node's storage, as the driver reports it.
//!
//! The storage may be unusable when the process starts (not mounted, another disk, no quotas, no driver) or become so later. The process
//! keeps running: it records an event on the Node object that says what is wrong and what to do, and continues when the storage is usable.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use tokio::sync::Notify;
use tokio::time::{Instant, interval_at, sleep, sleep_until};

use crate::api::events::Reason;
use crate::node::context::Context;
use crate::node::foreign_files;
use crate::store::driver::{NodeState, StorageError, StorageState};

/// Time without a state after which the storage counts as unavailable. The driver restarts in less.
const GRACE: Duration = Duration::from_secs(30);
/// Interval at which an outage is reported again. The API server deletes an event an hour after its last occurrence.
const REPORT_INTERVAL: Duration = Duration::from_secs(1800);
/// Wait before the first attempt to connect again. Each further wait is twice as long, up to [`RETRY_LONGEST`].
const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest wait before an attempt to connect again.
const RETRY_LONGEST: Duration = Duration::from_secs(5);

/// Follows the state until shutdown.
pub(crate) async fn run(ctx: Arc<Context>) {
    let found = Notify::new();
    tokio::join!(follow(&ctx, &found), foreign_files::run(&ctx, &found));
}

/// Applies each state. Notifies `found` if the driver may have found other files that are charged to another volume.
async fn follow(ctx: &Context, found: &Notify) {
    let mut watched = Watched { ctx, found, last: None, outage: None };
    let mut states = pin!(states(ctx));
    // Why there is no state, and when the storage counts as unavailable for that reason.
    let mut why = "the driver loopfs-csi has not opened the storage yet; read its log".to_owned();
    let mut deadline = Some(Instant::now() + GRACE);
    let mut reports = interval_at(Instant::now() + REPORT_INTERVAL, REPORT_INTERVAL);
    loop {
        let outage = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let is_known = tokio::select! {
            Some(state) = states.next() => match state {
                Ok(state) => watched.apply(state),
                Err(error) => {
                    watched.last = None;
                    why = error.to_string();
                    false
                }
            },
            () = outage => {
                watched.set(StorageState::Unavailable(why.clone()));
                true
            }
            _ = reports.tick() => {
                // Nodes without storage may be many, and lack nothing.
                if !ctx.storage.is_absent() {
                    watched.report();
                }
                continue;
            }
        };
        deadline = if is_known { None } else { deadline.or_else(|| Some(Instant::now() + GRACE)) };
    }
}

/// Returns the states of the driver, and an error for each connection that breaks or fails. Never ends.
fn states(ctx: &Context) -> impl Stream<Item = Result<NodeState, StorageError>> {
    type Connection = BoxStream<'static, Result<NodeState, StorageError>>;
    stream::unfold((None::<Connection>, Duration::ZERO), async |(connection, wait)| {
        let next = async {
            let mut states = match connection {
                Some(states) => states,
                None => {
                    sleep(wait).await;
                    ctx.storage.driver_in_any_state().watch().await?
                }
            };
            match states.next().await {
                Some(state) => Ok((state?, states)),
                None => {
                    Err(StorageError::Unanswered("the driver loopfs-csi ended the connection".to_owned()))
                }
            }
        };
        Some(match next.await {
            Ok((state, states)) => (Ok(state), (Some(states), Duration::ZERO)),
            Err(error) => (Err(error), (None, (wait * 2).clamp(RETRY_FIRST, RETRY_LONGEST))),
        })
    })
}

/// The states so far.
struct Watched<'a> {
    ctx: &'a Context,
    found: &'a Notify,
    /// The last state that was received over this connection.
    last: Option<NodeState>,
    /// Why the storage is unavailable, since the event that reported it.
    outage: Option<String>,
}

impl Watched<'_> {
    /// Applies a state. Returns `false` if it says nothing about the storage, because the driver is starting.
    fn apply(&mut self, state: NodeState) -> bool {
        if state.storage == StorageState::Untried {
            // Calls to a driver that is starting would fail. An absent disk or a fault is still known.
            if self.ctx.storage.driver().is_ok() {
                self.set(StorageState::Untried);
            }
            return false;
        }
        let is_another = self.set(state.storage.clone());
        let opened = is_another && matches!(state.storage, StorageState::Open { .. });
        let before = self.last.replace(state.clone());
        // What happened while there was no connection is unknown.
        let changed = |counter: fn(&NodeState) -> u64| {
            before.as_ref().is_none_or(|before| counter(before) != counter(&state))
        };
        if changed(|state| state.space) {
            self.ctx.capacity.notify_one();
        }
        if opened || changed(|state| state.freed) {
            self.ctx.bump_retry_generation();
        }
        if opened || before.is_none() {
            self.ctx.claims_deleted.notify_one();
        }
        if state.foreign_files > 0 && changed(|state| state.foreign_files) {
            self.found.notify_one();
        }
        true
    }

    /// Sets the state, and records an event. Returns `false` if the state was the same before.
    fn set(&mut self, state: StorageState) -> bool {
        if !self.ctx.storage.set(state.clone()) {
            return false;
        }
        match state {
            StorageState::Unavailable(why) | StorageState::Absent(why) => {
                self.outage = Some(why);
                self.report();
            }
            StorageState::Open { filesystem_uuid } => {
                tracing::info!(filesystem = filesystem_uuid, "the driver has opened the volume store");
                if self.outage.take().is_some() {
                    let note = format!("the volume store on file system {filesystem_uuid} is in use again");
                    self.ctx.cluster.events.publish_on_node(Reason::StorageReady, note);
                }
            }
            StorageState::Untried => {}
        }
        true
    }

    /// Records the event of an outage, if there is one.
    fn report(&self) {
        if let Some(why) = &self.outage {
            self.ctx.cluster.events.publish_on_node(Reason::StorageUnavailable, why.clone());
        }
    }
}

#[cfg(test)]
mod tests;
