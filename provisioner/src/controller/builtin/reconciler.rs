//! Watches the declaration and the objects, and repairs the objects.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use futures::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, PostParams, Preconditions},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event},
    },
};

use super::{
    declaration::{self, Declaration, DeclarationError},
    kinds::{KINDS, Key, Kind},
    plan::{self, Action},
};
use crate::{
    api::{absence, backoff::Backoff, cluster::Cluster, events::Reason},
    error::{Error, api_message},
    objects::identity::{Identity, MANAGER},
};

/// The ConfigMap of the declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) namespace: String,
    pub(crate) config_map: String,
}

/// Reconciles the objects until shutdown.
pub(crate) async fn run(cluster: Cluster, source: Source) {
    let reconciler = Reconciler { cluster: &cluster, source: &source, backoff: Backoff::default() };
    let mut changes = Box::pin(reconciler.changes());
    let mut state = ObservedState::default();
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
        turn = reconciler.next_turn(&state, turn, Instant::now());
    }
}

/// An event of one of the watches.
enum Change {
    Declaration(Event<ConfigMap>),
    Objects(&'static Kind, Event<DynamicObject>),
}

/// The state of the cluster, as the watches have reported it.
#[derive(Default)]
struct ObservedState {
    declaration: Option<DeclarationState>,
    /// The ConfigMap of a list that is not complete yet.
    found: Option<ConfigMap>,
    objects: BTreeMap<Key, DynamicObject>,
    /// The objects of lists that are not complete yet, by kind.
    listing: BTreeMap<&'static str, BTreeMap<Key, DynamicObject>>,
    synced: BTreeSet<&'static str>,
}

/// The declaration, if there is a valid one.
#[derive(Debug, Clone, PartialEq)]
enum DeclarationState {
    /// The ConfigMap does not exist. No object is removed for that.
    Missing,
    Invalid(Box<ConfigMap>, DeclarationError),
    Valid(Box<ConfigMap>, Declaration),
}

impl DeclarationState {
    fn read(config_map: Option<ConfigMap>, source: &Source, identity: &Identity) -> Self {
        let Some(config_map) = config_map else { return DeclarationState::Missing };
        match declaration::parse(&config_map, &source.namespace, identity) {
            Ok(declaration) => DeclarationState::Valid(Box::new(config_map), declaration),
            Err(error) => DeclarationState::Invalid(Box::new(config_map), error),
        }
    }
}

impl ObservedState {
    /// Applies an event of the watch of a kind.
    fn objects(&mut self, kind: &'static Kind, event: Event<DynamicObject>) {
        match event {
            Event::Apply(object) => drop(self.objects.insert(Key::of(kind, &object), object)),
            Event::Delete(object) => drop(self.objects.remove(&Key::of(kind, &object))),
            Event::Init => drop(self.listing.insert(kind.name, BTreeMap::new())),
            Event::InitApply(object) => {
                self.listing.entry(kind.name).or_default().insert(Key::of(kind, &object), object);
            }
            Event::InitDone => {
                let listed = self.listing.remove(kind.name).unwrap_or_default();
                self.objects.retain(|key, _| key.kind != kind.name);
                self.objects.extend(listed);
                self.synced.insert(kind.name);
            }
        }
    }

    /// Returns the actions to take, or none until all watches have received their first list.
    fn steps(&self, identity: &Identity) -> Vec<(Key, Action)> {
        let Some(DeclarationState::Valid(_, declaration)) = &self.declaration else { return vec![] };
        if self.synced.len() < KINDS.len() {
            return vec![];
        }
        plan::steps(declaration, &self.objects, identity)
    }
}

/// The values on which the outcome of an attempt depends: the versions of the declaration and of the object.
type RetryKey = (Option<String>, Option<String>);

struct Reconciler<'a> {
    cluster: &'a Cluster,
    source: &'a Source,
    backoff: Backoff<Key, RetryKey>,
}

impl Reconciler<'_> {
    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.cluster.client.clone(), &self.source.namespace)
    }

    fn api(&self, kind: &Kind) -> Api<DynamicObject> {
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
        for kind in KINDS {
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
            Change::Declaration(Event::Apply(object)) => self.declare(Some(object), state),
            Change::Declaration(Event::Delete(_)) => self.declare(None, state),
            // The previous declaration stays valid until the list is complete.
            Change::Declaration(Event::Init) => state.found = None,
            Change::Declaration(Event::InitApply(object)) => state.found = Some(object),
            Change::Declaration(Event::InitDone) => {
                let found = state.found.take();
                self.declare(found, state);
            }
        }
    }

    /// Replaces the declaration, and reports why the new one is invalid.
    fn declare(&self, config_map: Option<ConfigMap>, state: &mut ObservedState) {
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
                let Source { namespace, config_map } = self.source;
                let note = format!(
                    "ConfigMap {namespace}/{config_map}, which declares the built-in objects, does not exist, so they stay unchanged; \
                     create it with the objects to keep, or leave out --builtin-objects"
                );
                self.cluster.events.publish_on_node(Reason::DeclarationInvalid, note);
            }
        }
        state.declaration = Some(declared);
    }

    /// Returns when to repair next, if there is anything to repair: at `turn` or sooner.
    fn next_turn(&self, state: &ObservedState, turn: Option<Instant>, now: Instant) -> Option<Instant> {
        let steps = state.steps(&self.cluster.identity);
        let waits = steps.iter().map(|(key, _)| {
            let retry_key = retry_key(key, state);
            let held = self.backoff.remaining(key, &retry_key, now);
            held.unwrap_or_default()
        });
        let due = now + waits.min()?;
        Some(turn.map_or(due, |turn| turn.min(due)))
    }

    /// Repairs all objects that are not in back-off.
    async fn repair(&self, state: &mut ObservedState) {
        // Another replica may have acted on a newer declaration that the watch has not delivered yet.
        match absence::get_opt(&self.config_maps(), &self.source.config_map).await {
            Ok(config_map) => self.declare(config_map, state),
            Err(error) => {
                tracing::warn!(
                    error = api_message(&error),
                    "could not read the declaration of the built-in objects; the next attempt follows with back-off"
                );
                // The actions wait with back-off, as if they had been attempted.
                for (key, _) in state.steps(&self.cluster.identity) {
                    let retry_key = retry_key(&key, state);
                    self.backoff.failed(key, retry_key, Instant::now());
                }
                return;
            }
        }
        for (key, action) in state.steps(&self.cluster.identity) {
            let retry_key = retry_key(&key, state);
            if self.backoff.remaining(&key, &retry_key, Instant::now()).is_some() {
                continue;
            }
            match self.act(&key, action, state).await {
                Ok(Outcome::Done) => self.backoff.clear(&key),
                Ok(Outcome::Refused) => {
                    let note = format!(
                        "{key} is declared, but the existing {key} is not labelled {}, so it stays unchanged; add the labels to have it kept \
                         as declared, delete it, or remove it from the declaration",
                        declaration::selector(&self.cluster.identity)
                    );
                    self.publish(state, Reason::ObjectRefused, note);
                    self.backoff.failed(key, retry_key, Instant::now());
                }
                // Another writer was first. The watch delivers the newer version, which is not in back-off.
                Err(error) if error.is_conflict() => {
                    tracing::debug!(object = %key, %error, "the object changed in the meantime; it is compared again");
                    self.backoff.failed(key, retry_key, Instant::now());
                }
                Err(error) => {
                    self.publish(state, Reason::ObjectFailed, error.to_string());
                    self.backoff.failed(key, retry_key, Instant::now());
                }
            }
        }
    }

    async fn act(&self, key: &Key, action: Action, state: &mut ObservedState) -> Result<Outcome, Error> {
        let Some(kind) = Kind::named(key.kind) else { return Ok(Outcome::Done) };
        let api = self.api(kind);
        match action {
            Action::Refuse => Ok(Outcome::Refused),
            Action::Create(object) => self.create(&api, kind, key, &object, state, "it did not exist").await,
            Action::Update { object, fields } => {
                let updated = api.replace(&key.name, &parameters(), &object).await;
                let updated = updated.map_err(|error| Error::api("update", key.to_string(), error))?;
                self.repaired(key, &differed(&fields), state);
                state.objects.insert(key.clone(), updated);
                Ok(Outcome::Done)
            }
            Action::Replace { found, object, fields } => {
                accepted(&api, key, &object).await?;
                delete(&api, kind, key, found).await?;
                state.objects.remove(key);
                // After a crash here the object does not exist, and the next reconcile creates it.
                let why = format!("{}, and the API server does not allow to change that", differed(&fields));
                self.create(&api, kind, key, &object, state, &why).await
            }
            Action::Remove(found) => {
                delete(&api, kind, key, found).await?;
                state.objects.remove(key);
                self.publish(
                    state,
                    Reason::ObjectRepaired,
                    format!("deleted {key}, because it is not declared any more"),
                );
                Ok(Outcome::Done)
            }
        }
    }

    async fn create(
        &self,
        api: &Api<DynamicObject>,
        kind: &'static Kind,
        key: &Key,
        object: &DynamicObject,
        state: &mut ObservedState,
        why: &str,
    ) -> Result<Outcome, Error> {
        let failed = |error| Error::api("create", key.to_string(), error);
        match api.create(&parameters(), object).await {
            Ok(created) => {
                self.publish(state, Reason::ObjectRepaired, format!("created {key}: {why}"));
                state.objects.insert(key.clone(), created);
                Ok(Outcome::Done)
            }
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let found = api.get(&key.name).await;
                let found = absence::unless_absent::<DynamicObject, _>(found, &kind.resource(), &key.name);
                let found = found.map_err(failed)?;
                match plan::action(kind, Some(object), found.as_ref(), &self.cluster.identity) {
                    Some(Action::Refuse) => Ok(Outcome::Refused),
                    // Another writer created it, or it is being deleted: the watch reports that.
                    _ => Ok(Outcome::Done),
                }
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn repaired(&self, key: &Key, why: &str, state: &ObservedState) {
        self.publish(state, Reason::ObjectRepaired, format!("updated {key}: {why}"));
    }

    /// Records an event on the ConfigMap of the declaration.
    fn publish(&self, state: &ObservedState, reason: Reason, note: String) {
        if let Some(DeclarationState::Valid(config_map, _)) = &state.declaration {
            self.cluster.events.publish(&**config_map, reason, note);
        }
    }
}

/// The outcome of an action.
enum Outcome {
    Done,
    Refused,
}

fn parameters() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() }
}

/// Has the API server say whether it would create the object, before the existing one is deleted.
async fn accepted(api: &Api<DynamicObject>, key: &Key, object: &DynamicObject) -> Result<(), Error> {
    match api.create(&PostParams { dry_run: true, ..parameters() }, object).await {
        Ok(_) => Ok(()),
        // The API server compares the name after it has checked the object.
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => {
            Err(Error::api("create", format!("{key} in place of the existing one, which stays"), error))
        }
    }
}

fn differed(fields: &[String]) -> String {
    format!("{} differed", fields.join(", "))
}

/// Deletes an object, unless it changed since the decision. An object that does not exist any more is no error.
async fn delete(api: &Api<DynamicObject>, kind: &Kind, key: &Key, found: Preconditions) -> Result<(), Error> {
    let deleted = api.delete(&key.name, &DeleteParams::default().preconditions(found)).await;
    absence::unless_absent::<DynamicObject, _>(deleted, &kind.resource(), &key.name)
        .map(drop)
        .map_err(|error| Error::api("delete", key.to_string(), error))
}

fn retry_key(key: &Key, state: &ObservedState) -> RetryKey {
    let declared = match &state.declaration {
        Some(DeclarationState::Valid(_, declaration)) => declaration.version.clone(),
        _ => None,
    };
    (declared, state.objects.get(key).and_then(ResourceExt::resource_version))
}
