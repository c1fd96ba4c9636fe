//! Watches the declaration and the objects, and repairs the objects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, DynamicObject, PostParams, Preconditions, Request};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt};

use super::declaration::{self, Declaration};
use super::kinds::{KINDS, ManagedKind, ObjectKey};
use super::plan::{self, ObjectAction};
use crate::api::absence;
use crate::api::backoff::Backoff;
use crate::api::cluster::Cluster;
use crate::api::events::Reason;
use crate::error::{Error, api_message};
use crate::objects::identity::{Identity, MANAGER};

/// How long an object must differ from an unchanged declaration before it is repaired. An upgrade changes the objects and the ConfigMap
/// one after the other, within seconds. Without this time, the controller would undo a change that the next ConfigMap declares. It could
/// then not restore a rule of a role that it has only by that role.
pub(crate) const REPAIR_DELAY: Duration = Duration::from_secs(60);

/// The ConfigMap of the declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeclarationSource {
    pub(crate) namespace: String,
    pub(crate) config_map: String,
    /// See [`REPAIR_DELAY`].
    pub(crate) repair_delay: Duration,
}

/// Reconciles the objects until shutdown.
pub(crate) async fn run(cluster: &Cluster, source: &DeclarationSource) {
    let reconciler = BuiltinReconciler {
        cluster,
        source,
        backoff: Backoff::default(),
        stored_otherwise: Backoff::default(),
    };
    let mut changes = Box::pin(reconciler.changes());
    let mut state = ObservedState::new(source.repair_delay);
    let mut turn: Option<Instant> = None;
    loop {
        let wait = turn.map(|turn| turn.saturating_duration_since(Instant::now()));
        let its_turn = async {
            match wait {
                Some(wait) => tokio::time::sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            change = changes.next() => match change {
                Some(change) => reconciler.apply_event(change, &mut state),
                // A watch does not end. Without any watch, there is nothing left to do.
                None => return,
            },
            () = its_turn => {
                reconciler.repair(&mut state).await;
                turn = None;
            }
        }
        while let Some(Some(change)) = changes.next().now_or_never() {
            reconciler.apply_event(change, &mut state);
        }
        turn = reconciler.next_turn(&mut state, turn, Instant::now());
    }
}

/// An event of one of the watches.
enum Change {
    Declaration(Event<ConfigMap>),
    Objects(&'static ManagedKind, Event<DynamicObject>),
}

/// The state of the cluster, as the watches have reported it.
struct ObservedState {
    repair_delay: Duration,
    declaration: Option<DeclarationState>,
    /// The ConfigMap of a list that is not complete yet.
    found: Option<ConfigMap>,
    objects: BTreeMap<ObjectKey, DynamicObject>,
    /// The objects of lists that are not complete yet, by kind.
    listing: BTreeMap<&'static str, BTreeMap<ObjectKey, DynamicObject>>,
    synced: BTreeSet<&'static str>,
    /// When each difference may be repaired.
    due: BTreeMap<ObjectKey, Instant>,
}

/// The declaration, if there is a valid one.
#[derive(Debug, Clone, PartialEq)]
enum DeclarationState {
    /// The ConfigMap does not exist. No object is removed for that.
    Missing,
    Invalid(Box<ConfigMap>, String),
    Valid(Box<ConfigMap>, Declaration),
}

impl DeclarationState {
    fn read(config_map: Option<ConfigMap>, source: &DeclarationSource, identity: &Identity) -> Self {
        let Some(config_map) = config_map else { return DeclarationState::Missing };
        match declaration::parse(&config_map, &source.namespace, identity) {
            Ok(declaration) => DeclarationState::Valid(Box::new(config_map), declaration),
            Err(error) => DeclarationState::Invalid(Box::new(config_map), error),
        }
    }
}

impl ObservedState {
    fn new(repair_delay: Duration) -> Self {
        ObservedState {
            repair_delay,
            declaration: None,
            found: None,
            objects: BTreeMap::new(),
            listing: BTreeMap::new(),
            synced: BTreeSet::new(),
            due: BTreeMap::new(),
        }
    }

    fn declaration(&self) -> Option<&Declaration> {
        match &self.declaration {
            Some(DeclarationState::Valid(_, declaration)) => Some(declaration),
            _ => None,
        }
    }

    /// Replaces the declaration. The objects whose declaration changed may be repaired immediately, because the difference is wanted.
    fn declare(&mut self, declared: DeclarationState, now: Instant) {
        let before = self.declaration.replace(declared);
        let Some(Declaration { objects: after, .. }) = self.declaration() else { return };
        let before = match &before {
            // The first declaration can be the one that an upgrade is about to replace.
            None => return,
            Some(DeclarationState::Valid(_, declaration)) => Some(&declaration.objects),
            Some(DeclarationState::Missing | DeclarationState::Invalid(..)) => None,
        };
        let keys: BTreeSet<&ObjectKey> =
            after.keys().chain(before.into_iter().flat_map(BTreeMap::keys)).collect();
        let is_changed = |key: &&ObjectKey| before.and_then(|before| before.get(*key)) != after.get(*key);
        let changed: Vec<ObjectKey> = keys.into_iter().filter(is_changed).cloned().collect();
        self.due.extend(changed.into_iter().map(|key| (key, now)));
    }

    /// Applies an event of the watch of a kind.
    fn objects(&mut self, kind: &'static ManagedKind, event: Event<DynamicObject>) {
        match event {
            Event::Apply(object) => drop(self.objects.insert(ObjectKey::of(kind, &object), object)),
            Event::Delete(object) => drop(self.objects.remove(&ObjectKey::of(kind, &object))),
            Event::Init => drop(self.listing.insert(kind.name, BTreeMap::new())),
            Event::InitApply(object) => {
                self.listing.entry(kind.name).or_default().insert(ObjectKey::of(kind, &object), object);
            }
            Event::InitDone => {
                let listed = self.listing.remove(kind.name).unwrap_or_default();
                self.objects.retain(|key, _| key.kind != kind.name);
                self.objects.extend(listed);
                self.synced.insert(kind.name);
            }
        }
    }

    /// Returns the actions to take, with the time from which each may be taken, or none until all watches have received their first list.
    fn steps(&mut self, identity: &Identity, now: Instant) -> Vec<(ObjectKey, ObjectAction, Instant)> {
        let Some(DeclarationState::Valid(_, declaration)) = &self.declaration else { return vec![] };
        if self.synced.len() < KINDS.len() {
            return vec![];
        }
        let steps = plan::steps(declaration, &self.objects, identity);
        self.due.retain(|key, _| steps.iter().any(|(step, _)| step == key));
        let with_time = |(key, action): (ObjectKey, ObjectAction)| {
            let due = match action {
                // These change nothing that exists.
                ObjectAction::Create(_) | ObjectAction::Refuse | ObjectAction::Immutable { .. } => now,
                ObjectAction::Update { .. } | ObjectAction::Replace { .. } | ObjectAction::Remove(_) => {
                    *self.due.entry(key.clone()).or_insert(now + self.repair_delay)
                }
            };
            (key, action, due)
        };
        steps.into_iter().map(with_time).collect()
    }
}

/// The values on which the outcome of an attempt depends: the versions of the declaration and of the object.
type RetryKey = (Option<String>, Option<String>);

struct BuiltinReconciler<'a> {
    cluster: &'a Cluster,
    source: &'a DeclarationSource,
    backoff: Backoff<ObjectKey, RetryKey>,
    /// The objects that the API server stores otherwise than declared, by the version of the declaration. A write gives such an object a
    /// new version, which must not shorten the wait.
    stored_otherwise: Backoff<ObjectKey, Option<String>>,
}

impl BuiltinReconciler<'_> {
    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.cluster.client.clone(), &self.source.namespace)
    }

    fn api(&self, kind: &ManagedKind) -> Api<DynamicObject> {
        let client = self.cluster.client.clone();
        if kind.namespaced {
            Api::namespaced_with(client, &self.source.namespace, &kind.resource())
        } else {
            Api::all_with(client, &kind.resource())
        }
    }

    /// Watches the declaration and the objects with the labels of this driver. Objects of other owners are noticed when one of the
    /// same name has to be created.
    fn changes(&self) -> impl Stream<Item = Change> + Send + use<> {
        let named = watcher::Config::default().fields(&format!("metadata.name={}", self.source.config_map));
        let declaration = watcher::watcher(self.config_maps(), named).default_backoff();
        let declaration = declaration.map(|event| event.map(Change::Declaration));
        let labelled = watcher::Config::default().labels(&declaration::selector(&self.cluster.identity));
        let mut watches = vec![declaration.boxed()];
        for kind in &*KINDS {
            let objects = watcher::watcher(self.api(kind), labelled.clone()).default_backoff();
            watches.push(objects.map(move |event| event.map(|event| Change::Objects(kind, event))).boxed());
        }
        stream::select_all(watches).filter_map(|change| {
            let change = change.inspect_err(
                |error| tracing::warn!(%error, "a watch for the built-in objects failed; it restarts with back-off"),
            );
            std::future::ready(change.ok())
        })
    }

    fn apply_event(&self, change: Change, state: &mut ObservedState) {
        match change {
            Change::Objects(kind, event) => state.objects(kind, event),
            Change::Declaration(Event::Apply(object)) => self.declare(Some(object), state, Instant::now()),
            Change::Declaration(Event::Delete(_)) => self.declare(None, state, Instant::now()),
            // The previous declaration stays valid until the list is complete.
            Change::Declaration(Event::Init) => state.found = None,
            Change::Declaration(Event::InitApply(object)) => state.found = Some(object),
            Change::Declaration(Event::InitDone) => {
                let found = state.found.take();
                self.declare(found, state, Instant::now());
            }
        }
    }

    /// Replaces the declaration, and reports why the new one is invalid.
    fn declare(&self, config_map: Option<ConfigMap>, state: &mut ObservedState, now: Instant) {
        let declared = DeclarationState::read(config_map, self.source, &self.cluster.identity);
        if state.declaration.as_ref() == Some(&declared) {
            return;
        }
        match &declared {
            DeclarationState::Valid(..) => {}
            DeclarationState::Invalid(config_map, error) => {
                let note =
                    format!("the declaration is invalid, so the built-in objects stay unchanged: {error}");
                self.cluster.events.publish(&**config_map, Reason::DeclarationInvalid, note);
            }
            DeclarationState::Missing => {
                let DeclarationSource { namespace, config_map, .. } = self.source;
                let note = format!(
                    "ConfigMap {namespace}/{config_map}, which declares the built-in objects, does not exist, so they stay unchanged; \
                     create it with the objects to keep, or leave out --builtin-objects"
                );
                self.cluster.events.publish_on_node(Reason::DeclarationInvalid, note);
            }
        }
        state.declare(declared, now);
    }

    /// Returns when to repair next, if there is anything to repair: at `turn` or sooner.
    fn next_turn(&self, state: &mut ObservedState, turn: Option<Instant>, now: Instant) -> Option<Instant> {
        let steps = state.steps(&self.cluster.identity, now);
        let due = steps.iter().map(|(key, _, due)| self.due(key, *due, state, now)).min()?;
        Some(turn.map_or(due, |turn| turn.min(due)))
    }

    /// Returns the time of the next attempt for an object: when it is due, or later after a failure.
    fn due(&self, key: &ObjectKey, due: Instant, state: &ObservedState, now: Instant) -> Instant {
        let retry_key = retry_key(key, state);
        let waits = [
            self.backoff.remaining(key, &retry_key, now),
            self.stored_otherwise.remaining(key, &retry_key.0, now),
        ];
        waits.into_iter().flatten().map(|wait| now + wait).fold(due, Instant::max)
    }

    /// Repairs all objects that are not in back-off.
    async fn repair(&self, state: &mut ObservedState) {
        // Another replica may have acted on a newer declaration that the watch has not delivered yet.
        match absence::get_opt(&self.config_maps(), &self.source.config_map).await {
            Ok(config_map) => self.declare(config_map, state, Instant::now()),
            Err(error) => {
                tracing::warn!(
                    error = api_message(&error),
                    "could not read the declaration of the built-in objects; the next attempt follows with back-off"
                );
                // The actions wait with back-off, as if they had been attempted.
                let now = Instant::now();
                for (key, _, due) in state.steps(&self.cluster.identity, now) {
                    if due <= now {
                        let retry_key = retry_key(&key, state);
                        self.backoff.failed(key, retry_key, now);
                    }
                }
                return;
            }
        }
        for (key, action, due) in state.steps(&self.cluster.identity, Instant::now()) {
            let now = Instant::now();
            if self.due(&key, due, state, now) > now {
                continue;
            }
            let retry_key = retry_key(&key, state);
            match self.act(&key, action, state).await {
                Ok(()) => {
                    self.backoff.clear(&key);
                    self.stored_otherwise.clear(&key);
                }
                // Another writer was first. The watch delivers the newer version, which is not in back-off.
                Err(RepairError::Api(error)) if error.is_conflict() => {
                    tracing::debug!(object = %key, %error, "the object changed in the meantime; it is compared again");
                    self.backoff.failed(key, retry_key, Instant::now());
                }
                Err(error @ RepairError::StoredOtherwise { .. }) => {
                    self.publish(state, Reason::ObjectFailed, error.to_string());
                    self.stored_otherwise.failed(key, retry_key.0, Instant::now());
                }
                Err(error) => {
                    let is_refused = matches!(error, RepairError::Refused { .. });
                    let reason = if is_refused { Reason::ObjectRefused } else { Reason::ObjectFailed };
                    self.publish(state, reason, error.to_string());
                    self.backoff.failed(key, retry_key, Instant::now());
                }
            }
        }
    }

    async fn act(
        &self,
        key: &ObjectKey,
        action: ObjectAction,
        state: &mut ObservedState,
    ) -> Result<(), RepairError> {
        let Some(kind) = ManagedKind::named(key.kind) else { return Ok(()) };
        let api = self.api(kind);
        match action {
            ObjectAction::Refuse => Err(self.refused(key)),
            ObjectAction::Create(object) => {
                self.create(&api, kind, key, &object, state, "it did not exist").await
            }
            ObjectAction::Immutable { fields } => {
                Err(RepairError::Immutable { object: key.to_string(), fields: fields.join(", ") })
            }
            ObjectAction::Update { object, fields } => {
                let updated = self.replace(&api, &object).await;
                let updated = updated.map_err(|error| Error::api("update", key.to_string(), error))?;
                state.objects.insert(key.clone(), updated.clone());
                self.compare(kind, key, &updated, state, key.to_string())?;
                self.publish(state, Reason::ObjectRepaired, format!("updated {key}: {}", differed(&fields)));
                Ok(())
            }
            ObjectAction::Replace { found, object, fields } => {
                self.try_out(&api, kind, key, &object, state).await?;
                delete(&api, kind, key, found).await?;
                state.objects.remove(key);
                // After a crash here the object does not exist, and the next reconcile creates it.
                let why = format!("{}, and the API server does not allow to change that", differed(&fields));
                self.create(&api, kind, key, &object, state, &why).await
            }
            ObjectAction::Remove(found) => {
                delete(&api, kind, key, found).await?;
                state.objects.remove(key);
                self.publish(
                    state,
                    Reason::ObjectRepaired,
                    format!("deleted {key}, because it is not declared any more"),
                );
                Ok(())
            }
        }
    }

    async fn create(
        &self,
        api: &Api<DynamicObject>,
        kind: &'static ManagedKind,
        key: &ObjectKey,
        object: &DynamicObject,
        state: &mut ObservedState,
        why: &str,
    ) -> Result<(), RepairError> {
        let failed = |error| Error::api("create", key.to_string(), error);
        match self.post(api, object, false).await {
            Ok(created) => {
                state.objects.insert(key.clone(), created.clone());
                self.compare(kind, key, &created, state, key.to_string())?;
                self.publish(state, Reason::ObjectRepaired, format!("created {key}: {why}"));
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let found = api.get(&key.name).await;
                let found = absence::unless_absent::<DynamicObject, _>(found, &kind.resource(), &key.name);
                let found = found.map_err(failed)?;
                match plan::action(kind, Some(object), found.as_ref(), &self.cluster.identity) {
                    Some(ObjectAction::Refuse) => Err(self.refused(key)),
                    // Another writer created it, or it is being deleted: the watch reports that.
                    _ => Ok(()),
                }
            }
            Err(error) => Err(failed(error).into()),
        }
    }

    fn refused(&self, key: &ObjectKey) -> RepairError {
        RepairError::Refused {
            object: key.to_string(),
            labels: declaration::selector(&self.cluster.identity),
        }
    }

    /// Has the API server create the object under another name in a dry run, before the existing one is deleted. If it refuses the
    /// object, or would store it otherwise than declared, the existing one must stay.
    async fn try_out(
        &self,
        api: &Api<DynamicObject>,
        kind: &'static ManagedKind,
        key: &ObjectKey,
        object: &DynamicObject,
        state: &ObservedState,
    ) -> Result<(), RepairError> {
        let what = format!("{key} in place of the existing one, which stays");
        let mut renamed = object.clone();
        renamed.metadata.name = Some(format!("{}-dry-run", key.name));
        match self.post(api, &renamed, true).await {
            Ok(stored) => self.compare(kind, key, &stored, state, what),
            Err(error) => Err(Error::api("create", what, error).into()),
        }
    }

    /// Compares an object that the API server returned for a write with its declaration. Without this, the difference would be repaired
    /// again at once, and so on.
    fn compare(
        &self,
        kind: &'static ManagedKind,
        key: &ObjectKey,
        stored: &DynamicObject,
        state: &ObservedState,
        what: String,
    ) -> Result<(), RepairError> {
        let Some(declared) = state.declaration().and_then(|declaration| declaration.objects.get(key)) else {
            return Ok(());
        };
        let fields = plan::differences(kind, declared, stored, &self.cluster.identity);
        if fields.is_empty() {
            Ok(())
        } else {
            Err(RepairError::StoredOtherwise { object: what, fields: fields.join(", ") })
        }
    }

    async fn post(
        &self,
        api: &Api<DynamicObject>,
        object: &DynamicObject,
        dry_run: bool,
    ) -> kube::Result<DynamicObject> {
        let data = serde_json::to_vec(object).map_err(kube::Error::SerdeError)?;
        let request = Request::new(api.resource_url()).create(&parameters(dry_run), data);
        self.send_strictly(request.map_err(kube::Error::BuildRequest)?).await
    }

    async fn replace(&self, api: &Api<DynamicObject>, object: &DynamicObject) -> kube::Result<DynamicObject> {
        let data = serde_json::to_vec(object).map_err(kube::Error::SerdeError)?;
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let request = Request::new(api.resource_url()).replace(name, &parameters(false), data);
        self.send_strictly(request.map_err(kube::Error::BuildRequest)?).await
    }

    /// Sends a write, and has the API server refuse fields that it does not know. By default, the API server drops them without an
    /// error, and the stored object then never equals its declaration. kube has no parameter for this.
    async fn send_strictly(&self, mut request: http::Request<Vec<u8>>) -> kube::Result<DynamicObject> {
        let uri = format!("{}&fieldValidation=Strict", request.uri());
        *request.uri_mut() =
            uri.parse().map_err(|error: http::uri::InvalidUri| kube::Error::HttpError(error.into()))?;
        self.cluster.client.request(request).await
    }

    /// Records an event on the ConfigMap of the declaration.
    fn publish(&self, state: &ObservedState, reason: Reason, note: String) {
        if let Some(DeclarationState::Valid(config_map, _)) = &state.declaration {
            self.cluster.events.publish(&**config_map, reason, note);
        }
    }
}

/// The reason why an object is not in its declared state after an attempt.
#[derive(Debug, thiserror::Error)]
enum RepairError {
    #[error(transparent)]
    Api(#[from] Error),
    #[error(
        "{object} is declared, but the existing {object} is not labelled {labels}, so it stays unchanged; add the labels to have it kept as \
         declared, delete it, or remove it from the declaration"
    )]
    Refused { object: String, labels: String },
    /// An immutable field of an object that must not be deleted differs from its declaration.
    #[error(
        "{object} has other values of {fields} than declared, and the API server does not allow to change them; it stays, because while \
         it does not exist, pods start without their fsGroup; correct the declaration, or delete the object while no pod with a volume of \
         the driver starts, and the controller creates it as declared"
    )]
    Immutable { object: String, fields: String },
    /// The API server stores other values than it was sent: it normalises them, or an admission webhook changes them.
    #[error(
        "write {object}: the API server stores other values of {fields} than declared; declare the values that it stores, or correct the \
         admission webhook or policy that changes them"
    )]
    StoredOtherwise { object: String, fields: String },
}

fn parameters(dry_run: bool) -> PostParams {
    PostParams { dry_run, field_manager: Some(MANAGER.to_owned()) }
}

fn differed(fields: &[String]) -> String {
    format!("{} differed", fields.join(", "))
}

/// Deletes an object, unless it changed since the decision. An object that does not exist any more is no error.
async fn delete(
    api: &Api<DynamicObject>,
    kind: &ManagedKind,
    key: &ObjectKey,
    found: Preconditions,
) -> Result<(), Error> {
    let deleted = api.delete(&key.name, &DeleteParams::default().preconditions(found)).await;
    absence::unless_absent::<DynamicObject, _>(deleted, &kind.resource(), &key.name)
        .map(drop)
        .map_err(|error| Error::api("delete", key.to_string(), error))
}

fn retry_key(key: &ObjectKey, state: &ObservedState) -> RetryKey {
    let declared = state.declaration().and_then(|declaration| declaration.version.clone());
    (declared, state.objects.get(key).and_then(ResourceExt::resource_version))
}

#[cfg(test)]
mod tests {
    use http::Method;
    use rstest::rstest;
    use serde_json::{Value, json};
    use service::Delays;

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect};

    const DELAY: Duration = Duration::from_secs(60);
    const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";

    fn role(verb: &str) -> Value {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "r"},
            "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": [verb]}],
        })
    }

    fn source() -> DeclarationSource {
        DeclarationSource {
            namespace: "loopfs-system".to_owned(),
            config_map: "objects".to_owned(),
            repair_delay: DELAY,
        }
    }

    fn declared(version: &str, objects: &[Value]) -> DeclarationState {
        let files: serde_json::Map<_, _> = objects
            .iter()
            .enumerate()
            .map(|(number, object)| (number.to_string(), json!(object.to_string())))
            .collect();
        let config_map = json!({"metadata": {"resourceVersion": version}, "data": files});
        DeclarationState::read(serde_json::from_value(config_map).unwrap(), &source(), &fixtures::identity())
    }

    /// Returns an object as the API server returns it.
    fn stored(object: Value, version: &str) -> DynamicObject {
        let mut whole = object;
        let labels = declaration::labels(&fixtures::identity());
        fixtures::merge(
            &mut whole,
            json!({"metadata": {"uid": "u", "resourceVersion": version, "labels": labels}}),
        );
        serde_json::from_value(whole).unwrap()
    }

    fn observe(state: &mut ObservedState, object: DynamicObject) {
        state.objects(ManagedKind::named("ClusterRole").unwrap(), Event::Apply(object));
    }

    /// Returns the state of a controller that has read all objects, and which has seen this declaration for a long time.
    fn observed(declaration: DeclarationState, object: DynamicObject) -> ObservedState {
        let mut state = ObservedState::new(DELAY);
        for kind in &*KINDS {
            state.objects(kind, Event::Init);
            state.objects(kind, Event::InitDone);
        }
        observe(&mut state, object);
        state.declare(declaration, Instant::now());
        state
    }

    /// Returns the wait until the difference may be repaired.
    fn wait(state: &mut ObservedState, now: Instant) -> Option<Duration> {
        let steps = state.steps(&fixtures::identity(), now);
        steps.first().map(|(_, _, due)| due.saturating_duration_since(now))
    }

    #[test]
    fn a_new_difference_waits() {
        let mut state = observed(declared("1", &[role("get")]), stored(role("get"), "1"));
        let start = Instant::now();
        assert_eq!(wait(&mut state, start), None);
        observe(&mut state, stored(role("list"), "2"));
        assert_eq!(wait(&mut state, start), Some(DELAY));
        // Another change of the object does not extend the wait.
        observe(&mut state, stored(role("watch"), "3"));
        assert_eq!(wait(&mut state, start + DELAY / 2), Some(DELAY / 2));
        assert_eq!(wait(&mut state, start + DELAY), Some(Duration::ZERO));
        // The next difference is another one.
        observe(&mut state, stored(role("get"), "4"));
        assert_eq!(wait(&mut state, start + DELAY), None);
        observe(&mut state, stored(role("list"), "5"));
        assert_eq!(wait(&mut state, start + DELAY * 2), Some(DELAY));
    }

    #[test]
    fn a_difference_at_the_start_waits() {
        let mut state = observed(declared("1", &[role("get")]), stored(role("list"), "1"));
        assert_eq!(wait(&mut state, Instant::now()), Some(DELAY));
    }

    #[test]
    fn a_declared_change_is_made_immediately() {
        let mut other = role("get");
        other["metadata"]["name"] = json!("other");
        let mut state = observed(declared("1", &[role("get")]), stored(role("get"), "1"));
        let now = Instant::now();
        state.declare(declared("2", &[role("list")]), now);
        assert_eq!(wait(&mut state, now), Some(Duration::ZERO));
        // The declaration of another object says nothing about this one.
        let mut state = observed(declared("1", &[role("get")]), stored(role("list"), "1"));
        let now = Instant::now();
        assert_eq!(wait(&mut state, now), Some(DELAY));
        state.declare(declared("2", &[role("get"), other]), now);
        let steps = state.steps(&fixtures::identity(), now);
        let due: Vec<_> = steps.iter().map(|(key, _, due)| (key.name.as_str(), *due - now)).collect();
        assert_eq!(due, [("other", Duration::ZERO), ("r", DELAY)]);
    }

    #[test]
    fn a_missing_object_is_created_immediately() {
        let mut state = observed(declared("1", &[role("get")]), stored(role("get"), "1"));
        state.objects.clear();
        assert_eq!(wait(&mut state, Instant::now()), Some(Duration::ZERO));
    }

    /// The second repair is within the delay, however late it is.
    const HOUR: Delays = Delays { first: Duration::from_secs(3600), longest: Duration::from_secs(3600) };

    /// Repairs twice, without a watch. Returns the reasons of the events.
    async fn repaired(mut state: ObservedState, requests: Vec<ExpectedRequest>) -> Vec<&'static str> {
        let config_map = "/api/v1/namespaces/loopfs-system/configmaps/objects";
        let Some(DeclarationState::Valid(map, _)) = state.declaration.clone() else {
            panic!("no declaration")
        };
        let read = || expect(Method::GET, config_map, None).respond(&map);
        let all: Vec<_> = [read()].into_iter().chain(requests).chain([read()]).collect();
        let context = TestContext::new(all);
        let source = source();
        let reconciler = BuiltinReconciler {
            cluster: &context.ctx.cluster,
            source: &source,
            backoff: Backoff::new(HOUR),
            stored_otherwise: Backoff::new(HOUR),
        };
        state.repair_delay = Duration::ZERO;
        for _ in 0..2 {
            reconciler.repair(&mut state).await;
        }
        context.finish().await
    }

    /// The API server drops or normalises a declared field, or a webhook changes it.
    #[rstest]
    #[case::unchanged("1")]
    #[case::changed_by_each_write("2")]
    #[tokio::test]
    async fn field_stored_otherwise_is_a_failure(#[case] version: &str) {
        let state = observed(declared("1", &[role("get")]), stored(role("list"), "1"));
        let mut object = stored(role("get"), "1");
        object.metadata.annotations = Some(BTreeMap::new());
        let request = expect(Method::PUT, "/apis/rbac.authorization.k8s.io/v1/clusterroles/r", json!(object));
        let answer = stored(role("list"), version);
        assert_eq!(repaired(state, vec![request.respond(answer)]).await, ["ObjectFailed"]);
    }

    #[tokio::test]
    async fn a_created_object_is_compared() {
        let mut state = observed(declared("1", &[role("get")]), stored(role("get"), "1"));
        state.objects.clear();
        let object = state.declaration().unwrap().objects.values().next().unwrap().clone();
        let request = expect(Method::POST, ROLES, json!(object)).respond(stored(role("list"), "1"));
        assert_eq!(repaired(state, vec![request]).await, ["ObjectFailed"]);
    }

    fn binding(role: Value) -> Value {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "b"},
            "roleRef": role,
        })
    }

    /// Nothing is deleted for a replacement that would differ again.
    #[tokio::test]
    async fn differing_replacement_is_not_made() {
        let group = "rbac.authorization.k8s.io";
        let wanted = binding(json!({"apiGroup": group, "kind": "ClusterRole", "name": "r", "extra": "x"}));
        let present = binding(json!({"apiGroup": group, "kind": "ClusterRole", "name": "r"}));
        let mut state = observed(declared("1", std::slice::from_ref(&wanted)), stored(role("get"), "1"));
        state.objects.clear();
        state.objects(
            ManagedKind::named("ClusterRoleBinding").unwrap(),
            Event::Apply(stored(present.clone(), "1")),
        );
        let mut tried = stored(wanted, "1");
        tried.metadata.name = Some("b-dry-run".to_owned());
        (tried.metadata.uid, tried.metadata.resource_version) = (None, None);
        tried.metadata.annotations = Some(BTreeMap::new());
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        let request = expect(Method::POST, path, json!(tried)).respond(stored(present, "2"));
        assert_eq!(repaired(state, vec![request]).await, ["ObjectFailed"]);
    }
}
