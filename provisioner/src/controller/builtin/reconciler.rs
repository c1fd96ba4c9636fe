//! Watches the declaration and the objects, and repairs the objects.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
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
    kinds::{KINDS, Key, Kind, MANAGER},
    plan::{self, Action},
};
use crate::{
    api::{absence, backoff::Backoff, cluster::Cluster, events::Reason, jitter::stagger},
    error::{Error, api_message},
    objects::identity::Identity,
};

/// All provisioners see a difference at once, and one of them is to mend it: each waits its own part of this.
const SPREAD: Duration = Duration::from_secs(2);

/// Where the declaration is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) namespace: String,
    pub(crate) config_map: String,
}

/// Keeps the objects, for ever.
pub(crate) async fn run(cluster: Cluster, source: Source) {
    let keeper = Keeper { cluster: &cluster, source: &source, backoff: Backoff::default() };
    let mut changes = Box::pin(keeper.changes());
    let mut seen = Seen::default();
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
                Some(change) => keeper.absorb(change, &mut seen),
                // A watch has no end; without any, there is nothing left to do.
                None => return,
            },
            () = its_turn => {
                keeper.repair(&mut seen).await;
                turn = None;
            }
        }
        while let Some(Some(change)) = changes.next().now_or_never() {
            keeper.absorb(change, &mut seen);
        }
        turn = keeper.next_turn(&seen, turn, Instant::now());
    }
}

/// What the watches tell.
enum Change {
    Declaration(Event<ConfigMap>),
    Objects(&'static Kind, Event<DynamicObject>),
}

/// What is known of the cluster.
#[derive(Default)]
struct Seen {
    declaration: Option<Declared>,
    /// Of the current watch of the ConfigMap, which has not told all yet.
    found: Option<ConfigMap>,
    objects: BTreeMap<Key, DynamicObject>,
    /// What a watch that was begun anew has listed so far, by kind.
    listing: BTreeMap<&'static str, BTreeMap<Key, DynamicObject>>,
    synced: BTreeSet<&'static str>,
}

/// The declaration as it is known.
#[derive(Debug, Clone, PartialEq)]
enum Declared {
    /// There is none. That nothing is declared any more has to be said: nothing is removed for it.
    Missing,
    Invalid(Box<ConfigMap>, DeclarationError),
    Valid(Box<ConfigMap>, Declaration),
}

impl Declared {
    fn read(config_map: Option<ConfigMap>, source: &Source, identity: &Identity) -> Self {
        let Some(config_map) = config_map else { return Declared::Missing };
        match declaration::parse(&config_map, &source.namespace, identity) {
            Ok(declaration) => Declared::Valid(Box::new(config_map), declaration),
            Err(error) => Declared::Invalid(Box::new(config_map), error),
        }
    }
}

impl Seen {
    /// Takes in what a watch tells of the objects.
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

    /// What there is to do, once everything is known.
    fn steps(&self, identity: &Identity) -> Vec<(Key, Action)> {
        let Some(Declared::Valid(_, declaration)) = &self.declaration else { return vec![] };
        if self.synced.len() < KINDS.len() {
            return vec![];
        }
        plan::steps(declaration, &self.objects, identity)
    }
}

/// What the outcome of an attempt depends on.
type Circumstances = (Option<String>, Option<String>);

struct Keeper<'a> {
    cluster: &'a Cluster,
    source: &'a Source,
    backoff: Backoff<Key, Circumstances>,
}

impl Keeper<'_> {
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

    /// Everything that is watched: the declaration, and the objects labelled as ours. Those of others are met when one is to
    /// be created.
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
                |error| tracing::warn!(%error, "a watch for the built-in objects failed; it is retried"),
            );
            std::future::ready(change.ok())
        })
    }

    fn absorb(&self, change: Change, seen: &mut Seen) {
        match change {
            Change::Objects(kind, event) => seen.objects(kind, event),
            Change::Declaration(Event::Apply(object)) => self.declare(Some(object), seen),
            Change::Declaration(Event::Delete(_)) => self.declare(None, seen),
            // What was declared before stays so until the list is complete.
            Change::Declaration(Event::Init) => seen.found = None,
            Change::Declaration(Event::InitApply(object)) => seen.found = Some(object),
            Change::Declaration(Event::InitDone) => {
                let found = seen.found.take();
                self.declare(found, seen);
            }
        }
    }

    /// Takes a declaration as the one that counts, and says what is wrong with it.
    fn declare(&self, config_map: Option<ConfigMap>, seen: &mut Seen) {
        let declared = Declared::read(config_map, self.source, &self.cluster.identity);
        if seen.declaration.as_ref() == Some(&declared) {
            return;
        }
        match &declared {
            Declared::Valid(..) => {}
            Declared::Invalid(config_map, error) => {
                let note = format!("the built-in objects are left as they are: {error}");
                self.cluster.events.publish(&**config_map, Reason::DeclarationInvalid, note);
            }
            Declared::Missing => {
                let Source { namespace, config_map } = self.source;
                let note = format!(
                    "the built-in objects are left as they are: ConfigMap {namespace}/{config_map}, which is to declare them, does \
                     not exist; create it, or leave out --builtin-objects"
                );
                self.cluster.events.publish_on_node(&self.cluster.identity, Reason::DeclarationInvalid, note);
            }
        }
        seen.declaration = Some(declared);
    }

    /// When to look next, if there is anything to do: `turn` or sooner.
    fn next_turn(&self, seen: &Seen, turn: Option<Instant>, now: Instant) -> Option<Instant> {
        let steps = seen.steps(&self.cluster.identity);
        let waits = steps.iter().map(|(key, _)| {
            let circumstances = circumstances(key, seen);
            let held = self.backoff.remaining(key, &circumstances, now);
            held.unwrap_or_else(|| self.part(key, &circumstances))
        });
        let due = now + waits.min()?;
        Some(turn.map_or(due, |turn| turn.min(due)))
    }

    fn part(&self, key: &Key, circumstances: &Circumstances) -> Duration {
        let version = circumstances.1.as_deref().unwrap_or_default();
        stagger(&[self.cluster.identity.node(), key.kind, &key.name, version], SPREAD)
    }

    /// Does what there is to do.
    async fn repair(&self, seen: &mut Seen) {
        // As it is now: another provisioner may have acted on one that this one has not heard of.
        match absence::get_opt(&self.config_maps(), &self.source.config_map).await {
            Ok(config_map) => self.declare(config_map, seen),
            Err(error) => {
                tracing::warn!(
                    error = api_message(&error),
                    "the declaration of the built-in objects cannot be read"
                );
                // What was to be done is held off as if it had been tried.
                for (key, _) in seen.steps(&self.cluster.identity) {
                    let circumstances = circumstances(&key, seen);
                    self.backoff.failed(key, circumstances, Instant::now());
                }
                return;
            }
        }
        for (key, action) in seen.steps(&self.cluster.identity) {
            let circumstances = circumstances(&key, seen);
            if self.backoff.remaining(&key, &circumstances, Instant::now()).is_some() {
                continue;
            }
            match self.act(&key, action, seen).await {
                Ok(Done::Settled) => self.backoff.clear(&key),
                Ok(Done::Refused) => {
                    let note = format!(
                        "{key} is declared, and one that is not labelled {} exists; it is left alone: label it so to have it kept as \
                         declared, or remove it, or take it out of the declaration",
                        declaration::selector(&self.cluster.identity)
                    );
                    self.tell(seen, Reason::ObjectRefused, note);
                    self.backoff.failed(key, circumstances, Instant::now());
                }
                // Another was first. The watch brings the newer form, which is not held off.
                Err(error) if error.is_conflict() => {
                    tracing::debug!(object = %key, %error, "a conflict; the object is compared again");
                    self.backoff.failed(key, circumstances, Instant::now());
                }
                Err(error) => {
                    self.tell(seen, Reason::ObjectFailed, error.to_string());
                    self.backoff.failed(key, circumstances, Instant::now());
                }
            }
        }
    }

    async fn act(&self, key: &Key, action: Action, seen: &mut Seen) -> Result<Done, Error> {
        let Some(kind) = Kind::named(key.kind) else { return Ok(Done::Settled) };
        let api = self.api(kind);
        match action {
            Action::Refuse => Ok(Done::Refused),
            Action::Create(object) => self.create(&api, kind, key, &object, seen, "it did not exist").await,
            Action::Update { object, fields } => {
                let updated = api.replace(&key.name, &parameters(), &object).await;
                let updated = updated.map_err(|error| Error::api("update", key.to_string(), error))?;
                self.repaired(key, &differed(&fields), seen);
                seen.objects.insert(key.clone(), updated);
                Ok(Done::Settled)
            }
            Action::Replace { found, object, fields } => {
                delete(&api, kind, key, found).await?;
                seen.objects.remove(key);
                // A crash here, or another that is quicker, is the case of an object that does not exist.
                let why = format!("{}, which cannot be changed", differed(&fields));
                self.create(&api, kind, key, &object, seen, &why).await
            }
            Action::Remove(found) => {
                delete(&api, kind, key, found).await?;
                seen.objects.remove(key);
                self.tell(
                    seen,
                    Reason::ObjectRepaired,
                    format!("removed {key}: it is not declared any more"),
                );
                Ok(Done::Settled)
            }
        }
    }

    async fn create(
        &self,
        api: &Api<DynamicObject>,
        kind: &'static Kind,
        key: &Key,
        object: &DynamicObject,
        seen: &mut Seen,
        why: &str,
    ) -> Result<Done, Error> {
        let failed = |error| Error::api("create", key.to_string(), error);
        match api.create(&parameters(), object).await {
            Ok(created) => {
                self.tell(seen, Reason::ObjectRepaired, format!("created {key}: {why}"));
                seen.objects.insert(key.clone(), created);
                Ok(Done::Settled)
            }
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let found = api.get(&key.name).await;
                let found = absence::unless_absent::<DynamicObject, _>(found, &kind.resource(), &key.name);
                let found = found.map_err(failed)?;
                match plan::action(kind, Some(object), found.as_ref(), &self.cluster.identity) {
                    Some(Action::Refuse) => Ok(Done::Refused),
                    // Another provisioner's, or on its way out: the watch tells.
                    _ => Ok(Done::Settled),
                }
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn repaired(&self, key: &Key, why: &str, seen: &Seen) {
        self.tell(seen, Reason::ObjectRepaired, format!("updated {key}: {why}"));
    }

    /// Says it where the objects are declared.
    fn tell(&self, seen: &Seen, reason: Reason, note: String) {
        if let Some(Declared::Valid(config_map, _)) = &seen.declaration {
            self.cluster.events.publish(&**config_map, reason, note);
        }
    }
}

/// How an attempt ended.
enum Done {
    Settled,
    Refused,
}

fn parameters() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() }
}

fn differed(fields: &[String]) -> String {
    format!("{} differed", fields.join(", "))
}

/// Gone is gone, whoever did it.
async fn delete(api: &Api<DynamicObject>, kind: &Kind, key: &Key, found: Preconditions) -> Result<(), Error> {
    let parameters = DeleteParams { preconditions: Some(found), ..DeleteParams::default() };
    let deleted = api.delete(&key.name, &parameters).await;
    absence::unless_absent::<DynamicObject, _>(deleted, &kind.resource(), &key.name)
        .map(drop)
        .map_err(|error| Error::api("delete", key.to_string(), error))
}

fn circumstances(key: &Key, seen: &Seen) -> Circumstances {
    let declared = match &seen.declaration {
        Some(Declared::Valid(_, declaration)) => declaration.version.clone(),
        _ => None,
    };
    (declared, seen.objects.get(key).and_then(ResourceExt::resource_version))
}
