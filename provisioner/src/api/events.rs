//! Records events, which users read with `kubectl describe`: what happened to their claim or volume, and what to do.
//!
//! Reconciles put requests into a queue and continue. One task writes them to the API server. It aggregates repetitions into one
//! event with a count and limits the number of different events for one object, so that no number of retries loads the API server.
//! A token bucket limits the rate of events for many objects, because their volumes are more urgent. (kube's own recorder
//! aggregates by reason alone and would keep the first text after the facts have changed.)

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::api::hash::fnv1a;
use crate::objects::identity::Identity;

/// The reason of an event. Users search for these words; the sidecars of other drivers use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    Provisioning,
    ProvisioningSucceeded,
    ProvisioningFailed,
    /// The controller removed the selected node from the claim, so that another one can be selected.
    SelectedNodeRemoved,
    /// The selected node of the claim does not run the driver.
    DriverNotRegistered,
    /// The volume of the claim held data before.
    ExistingDataFound,
    Resizing,
    VolumeResizeSuccessful,
    VolumeResizeFailed,
    FileSystemResizeRequired,
    VolumeFailedDelete,
    VolumeDeleted,
    VolumeRetained,
    /// The volume of a PersistentVolume is missing.
    VolumeMissing,
    /// No PersistentVolume names these volumes.
    OrphanedVolumes,
    /// Too many volumes look orphaned for any to be removed.
    OrphanedVolumesKept,
    /// Files of the volume carry another project id than the volume.
    FilesInForeignProject,
    /// Files of another volume carry the project id of the volume.
    ChargedForForeignFiles,
    ProjectRepaired,
    StorageUnavailable,
    StorageReady,
    /// A built-in object was created, repaired or deleted.
    ObjectRepaired,
    /// A declared object exists without the labels of this driver.
    ObjectRefused,
    ObjectFailed,
    DeclarationInvalid,
    /// The node of a volume was deleted, or has lost its disk.
    NodeLost,
    /// The node of a claim's volume is not ready.
    NodeNotReady,
    /// The API server allows what the admission policies forbid.
    PoliciesNotEnforced,
}

/// The values of `type` in the events API.
const NORMAL: &str = "Normal";
const WARNING: &str = "Warning";

impl Reason {
    pub(crate) fn as_str(self) -> &'static str {
        self.fields().0
    }

    fn type_(self) -> &'static str {
        self.fields().1
    }

    /// Returns `reason`, `type` and `action` of the events API; the action is the operation.
    fn fields(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Reason::Provisioning => ("Provisioning", NORMAL, "Provision"),
            Reason::ProvisioningSucceeded => ("ProvisioningSucceeded", NORMAL, "Provision"),
            Reason::ProvisioningFailed => ("ProvisioningFailed", WARNING, "Provision"),
            Reason::SelectedNodeRemoved => ("SelectedNodeRemoved", NORMAL, "SelectNode"),
            Reason::DriverNotRegistered => ("DriverNotRegistered", WARNING, "SelectNode"),
            Reason::ExistingDataFound => ("ExistingDataFound", WARNING, "Provision"),
            Reason::Resizing => ("Resizing", NORMAL, "Resize"),
            Reason::VolumeResizeSuccessful => ("VolumeResizeSuccessful", NORMAL, "Resize"),
            Reason::VolumeResizeFailed => ("VolumeResizeFailed", WARNING, "Resize"),
            Reason::FileSystemResizeRequired => ("FileSystemResizeRequired", NORMAL, "Resize"),
            Reason::VolumeFailedDelete => ("VolumeFailedDelete", WARNING, "Delete"),
            Reason::VolumeDeleted => ("VolumeDeleted", NORMAL, "Delete"),
            Reason::VolumeRetained => ("VolumeRetained", NORMAL, "Delete"),
            Reason::VolumeMissing => ("VolumeMissing", WARNING, "Audit"),
            Reason::OrphanedVolumes => ("OrphanedVolumes", WARNING, "Audit"),
            Reason::OrphanedVolumesKept => ("OrphanedVolumesKept", WARNING, "Audit"),
            Reason::FilesInForeignProject => ("FilesInForeignProject", WARNING, "Audit"),
            Reason::ChargedForForeignFiles => ("ChargedForForeignFiles", WARNING, "Audit"),
            Reason::ProjectRepaired => ("ProjectRepaired", NORMAL, "Audit"),
            Reason::StorageUnavailable => ("StorageUnavailable", WARNING, "OpenStorage"),
            Reason::StorageReady => ("StorageReady", NORMAL, "OpenStorage"),
            Reason::ObjectRepaired => ("ObjectRepaired", NORMAL, "KeepObjects"),
            Reason::ObjectRefused => ("ObjectRefused", WARNING, "KeepObjects"),
            Reason::ObjectFailed => ("ObjectFailed", WARNING, "KeepObjects"),
            Reason::DeclarationInvalid => ("DeclarationInvalid", WARNING, "KeepObjects"),
            Reason::NodeLost => ("NodeLost", WARNING, "SettleNodeLoss"),
            Reason::NodeNotReady => ("NodeNotReady", WARNING, "CheckNodes"),
            Reason::PoliciesNotEnforced => ("PoliciesNotEnforced", WARNING, "CheckPolicies"),
        }
    }
}

/// A request to record an event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EventRequest {
    regarding: ObjectReference,
    pub(crate) reason: Reason,
    pub(crate) note: String,
    at: Timestamp,
}

impl EventRequest {
    /// Returns the request with the note as the API server accepts it. Tenants choose some of the names in the note, and thousands of
    /// requests can wait.
    fn new(regarding: ObjectReference, reason: Reason, mut note: String, at: Timestamp) -> Self {
        note.truncate(truncated(&note, NOTE_MAX).len());
        note.shrink_to_fit();
        EventRequest { regarding, reason, note, at }
    }
}

/// Counter of all event requests since the process started, including repetitions and requests of which no event is written.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventCounter(Family<[(&'static str, &'static str); 2], Counter>);

impl EventCounter {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Events that were recorded, first occurrences and repetitions, by the reason of the event";
        registry.register("events", help, self.0.clone());
    }
}

/// The event recorder: the sending end of the queue. Cheap to clone; never waits.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<EventRequest>,
    counter: EventCounter,
    /// The name of this node.
    node: Arc<str>,
}

/// Capacity of the queue: more than one request for each claim of a full node.
const QUEUE_LENGTH: usize = 4096;

impl Events {
    /// Returns the recorder and the queue for [`publish`].
    pub(crate) fn new(node: &str) -> (Self, mpsc::Receiver<EventRequest>) {
        let (queue, requests) = mpsc::channel(QUEUE_LENGTH);
        (Events { queue, counter: EventCounter::default(), node: node.into() }, requests)
    }

    /// Returns the counter of all requests so far.
    pub(crate) fn counter(&self) -> &EventCounter {
        &self.counter
    }

    /// Queues an event about an object.
    pub(crate) fn publish<K: Resource<DynamicType = ()>>(
        &self,
        regarding: &K,
        reason: Reason,
        note: impl Into<String>,
    ) {
        self.publish_about(regarding.object_ref(&()), reason, note.into());
    }

    /// Queues an event about this node.
    pub(crate) fn publish_on_node(&self, reason: Reason, note: impl Into<String>) {
        self.publish_about(self.own_node(), reason, note.into());
    }

    /// Returns the reference to this node that events about it have.
    pub(crate) fn own_node(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.node.to_string()),
            // The kubelet puts the name here too, and `kubectl describe node` looks for it: no need to read
            // the node.
            uid: Some(self.node.to_string()),
            ..Default::default()
        }
    }

    /// Queues an event about an object that the caller has a reference to.
    pub(crate) fn publish_about(&self, regarding: ObjectReference, reason: Reason, note: String) {
        self.counter.0.get_or_create(&[("type", reason.type_()), ("reason", reason.as_str())]).inc();
        let request = EventRequest::new(regarding, reason, note, Timestamp::now());
        if let Err(error) = self.queue.try_send(request) {
            tracing::warn!(%error, "an event is dropped, because the queue is full or closed");
        }
    }
}

/// Largest number of names in the text of an event.
const NAMES_MAX: usize = 8;

/// Returns the first names of a list for the text of an event, which has no space for all.
pub(crate) fn some_names<T: fmt::Display>(names: impl IntoIterator<Item = T>) -> String {
    let mut names = names.into_iter();
    let first: Vec<_> = names.by_ref().take(NAMES_MAX).map(|name| name.to_string()).collect();
    first.join(", ") + if names.next().is_some() { ", ..." } else { "" }
}

/// Writes queued requests to the log, and to the API server at a limited rate, until the last recorder is dropped. Then it
/// writes the remaining events without limit.
pub(crate) async fn publish(client: Client, identity: Identity, mut requests: mpsc::Receiver<EventRequest>) {
    let mut writer = EventWriter { client, identity, serial: 0, aggregator: Aggregator::default() };
    let mut bucket = TokenBucket { next: Instant::now() };
    let mut pending = VecDeque::new();
    loop {
        tokio::select! {
            request = requests.recv() => {
                let Some(request) = request else { break };
                let key = EventKey::of(&request);
                let write = writer.aggregator.observe(&key, Instant::now());
                log(&request, write.as_ref());
                match write {
                    None => {}
                    Some(_) if pending.len() == QUEUE_LENGTH => tracing::warn!("an event is dropped, because too many wait to be written"),
                    Some(write) => pending.push_back((key, request, write)),
                }
            }
            () = bucket.acquire(), if !pending.is_empty() => {
                if let Some((key, request, write)) = pending.pop_front() {
                    writer.write(&key, &request, write).await;
                }
            }
        }
    }
    for (key, request, write) in pending {
        writer.write(&key, &request, write).await;
    }
}

/// The size of the token bucket: events that the action of a person causes are written immediately.
const BURST: u32 = 100;
/// The interval at which the token bucket is refilled, as in the clients of other controllers.
const EVENT_INTERVAL: Duration = Duration::from_millis(200);

/// A token bucket: one write for each [`EVENT_INTERVAL`], at most [`BURST`] at a time.
#[derive(Debug)]
struct TokenBucket {
    /// When the refill will have covered all tokens acquired so far.
    next: Instant,
}

impl TokenBucket {
    /// Waits for the next token. A caller that stops waiting uses no token.
    async fn acquire(&mut self) {
        let wait =
            (self.next + EVENT_INTERVAL).saturating_duration_since(Instant::now() + EVENT_INTERVAL * BURST);
        tokio::time::sleep(wait).await;
        self.next = self.next.max(Instant::now()) + EVENT_INTERVAL;
    }
}

struct EventWriter {
    client: Client,
    identity: Identity,
    serial: u64,
    aggregator: Aggregator,
}

impl EventWriter {
    async fn write(&mut self, key: &EventKey, request: &EventRequest, write: EventWrite) {
        let events = namespaced(&self.client, request);
        let written = match write {
            EventWrite::Repeat { name, count } => repeat(&events, &name, count).await,
            EventWrite::First => {
                self.serial += 1;
                let event = new_event(request, &self.identity, self.serial);
                let name = event.metadata.name.clone().unwrap_or_default();
                let created = events.create(&PostParams::default(), &event).await;
                created.map(|_event| self.aggregator.created(key, name))
            }
        };
        if let Err(error) = written {
            // The write is not retried; the next occurrence starts a new series.
            self.aggregator.forget(key);
            if is_of_deleted_namespace(&error) {
                tracing::debug!(%error, reason = request.reason.as_str(), "an event was not written, because its namespace is being deleted");
                return;
            }
            tracing::warn!(%error, reason = request.reason.as_str(), "could not write an event; the next occurrence is written as a new one");
        }
    }
}

/// Returns `true` if the API server refuses an event because its namespace does not exist or is being deleted.
fn is_of_deleted_namespace(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let Some(details) = &status.details else { return false };
    details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating")
        || (status.reason == "NotFound" && details.kind == "namespaces")
}

/// Logs the first occurrence at the level of its type, and repetitions at level debug.
fn log(request: &EventRequest, write: Option<&EventWrite>) {
    let EventRequest { regarding, reason, note, .. } = request;
    let kind = regarding.kind.as_deref().unwrap_or_default();
    let namespace = regarding.namespace.as_deref().unwrap_or_default();
    let name = regarding.name.as_deref().unwrap_or_default();
    match (write, reason.type_()) {
        (Some(EventWrite::First), WARNING) => {
            tracing::warn!(kind, namespace, name, reason = reason.as_str(), "{note}")
        }
        (Some(EventWrite::First), _) => {
            tracing::info!(kind, namespace, name, reason = reason.as_str(), "{note}")
        }
        _ => tracing::debug!(kind, namespace, name, reason = reason.as_str(), "again: {note}"),
    }
}

async fn repeat(events: &Api<Event>, name: &str, count: i32) -> kube::Result<()> {
    let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
    let patch = Patch::Merge(json!({ "series": series }));
    events.patch(name, &PatchParams::default(), &patch).await.map(|_event| ())
}

/// Returns the API of the namespace of an event: "default" for objects without a namespace.
fn namespaced(client: &Client, request: &EventRequest) -> Api<Event> {
    Api::namespaced(client.clone(), request.regarding.namespace.as_deref().unwrap_or("default"))
}

/// Longest texts that the events API accepts, in bytes.
const NOTE_MAX: usize = 1024;
const NAME_MAX: usize = 253;
const REPORTER_MAX: usize = 128;

fn new_event(request: &EventRequest, identity: &Identity, serial: u64) -> Event {
    let (reason, type_, action) = request.reason.fields();
    let suffix = format!(".{:x}.{serial:x}", request.at.as_nanosecond());
    let object = request.regarding.name.as_deref().unwrap_or("unnamed");
    let kept = truncated(object, NAME_MAX - suffix.len()).trim_end_matches(['.', '-']);
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{kept}{suffix}")),
            namespace: Some(request.regarding.namespace.clone().unwrap_or_else(|| "default".to_owned())),
            ..Default::default()
        },
        event_time: Some(MicroTime(request.at)),
        type_: Some(type_.to_owned()),
        reason: Some(reason.to_owned()),
        action: Some(action.to_owned()),
        note: Some(request.note.clone()),
        regarding: Some(request.regarding.clone()),
        reporting_controller: Some(identity.driver().to_owned()),
        reporting_instance: Some(truncated(identity.node(), REPORTER_MAX).to_owned()),
        ..Default::default()
    }
}

/// Returns the beginning of a text, of at most this many bytes.
pub(crate) fn truncated(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The identity of an event: two requests with the same key are repetitions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct EventKey {
    subject: EventSubject,
    /// A hash of the note. The notes themselves would take megabytes.
    note: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct EventSubject {
    uid: Option<String>,
    name: Option<String>,
    namespace: Option<String>,
    reason: Reason,
}

impl EventKey {
    fn of(request: &EventRequest) -> Self {
        let ObjectReference { uid, name, namespace, .. } = request.regarding.clone();
        EventKey {
            subject: EventSubject { uid, name, namespace, reason: request.reason },
            note: fnv1a(&[&request.note]),
        }
    }
}

/// Time after which a repetition is a new event. It is much less than the hour for which API servers keep events.
const SERIES_END: Duration = Duration::from_secs(30 * 60);

/// Shortest interval between two updates of the count of one event.
const COUNT_UPDATE_INTERVAL: Duration = Duration::from_secs(10);

/// Largest number of different texts that are written about one object for one reason within [`SERIES_END`]. The debug log has
/// all texts.
const TEXTS_PER_SUBJECT: usize = 10;

/// Largest number of subjects whose series are known, as in the clients of other controllers. A tenant can create any number of claims
/// that get an event. The subject without requests for the longest time is forgotten first, and its next request is a new event.
const SUBJECTS_MAX: usize = 4096;

/// The series of events in progress. It decides which requests are written.
#[derive(Debug, Default)]
struct Aggregator {
    subjects: HashMap<EventSubject, Texts>,
    /// The subjects in the order of their last requests.
    by_last_request: BTreeMap<u64, EventSubject>,
    /// The number of requests so far.
    requests: u64,
}

/// The series about one subject.
#[derive(Debug, Default)]
struct Texts {
    /// The number of the last request.
    last_request: u64,
    /// By the hash of the note.
    series: HashMap<u64, Series>,
}

#[derive(Debug)]
struct Series {
    name: String,
    count: i32,
    seen: Instant,
    written: Instant,
}

/// A write to the API server.
#[derive(Debug, PartialEq, Eq)]
enum EventWrite {
    First,
    Repeat { name: String, count: i32 },
}

impl Aggregator {
    /// Counts a request. Returns the write to make, or `None` if there is none.
    fn observe(&mut self, key: &EventKey, now: Instant) -> Option<EventWrite> {
        let texts = self.requested(&key.subject);
        texts.retain(|_, series| !series.is_over(now));
        if let Some(series) = texts.get_mut(&key.note) {
            series.seen = now;
            series.count = series.count.saturating_add(1);
            if series.name.is_empty() || now.duration_since(series.written) < COUNT_UPDATE_INTERVAL {
                return None;
            }
            series.written = now;
            return Some(EventWrite::Repeat { name: series.name.clone(), count: series.count });
        }
        if texts.len() >= TEXTS_PER_SUBJECT {
            return None;
        }
        texts.insert(key.note, Series { name: String::new(), count: 1, seen: now, written: now });
        Some(EventWrite::First)
    }

    /// Returns the series about a subject for which there is a request, and forgets another subject if there are too many.
    fn requested(&mut self, subject: &EventSubject) -> &mut HashMap<u64, Series> {
        self.requests += 1;
        if let Some(known) = self.subjects.get(subject) {
            self.by_last_request.remove(&known.last_request);
        } else if self.subjects.len() >= SUBJECTS_MAX
            && let Some((_, oldest)) = self.by_last_request.pop_first()
        {
            self.subjects.remove(&oldest);
        }
        self.by_last_request.insert(self.requests, subject.clone());
        let texts = self.subjects.entry(subject.clone()).or_default();
        texts.last_request = self.requests;
        &mut texts.series
    }

    fn created(&mut self, key: &EventKey, name: String) {
        let texts = self.subjects.get_mut(&key.subject);
        if let Some(series) = texts.and_then(|texts| texts.series.get_mut(&key.note)) {
            series.name = name;
        }
    }

    fn forget(&mut self, key: &EventKey) {
        if let Some(texts) = self.subjects.get_mut(&key.subject) {
            texts.series.remove(&key.note);
        }
    }
}

impl Series {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.seen) >= SERIES_END
    }
}

#[cfg(test)]
mod tests;
