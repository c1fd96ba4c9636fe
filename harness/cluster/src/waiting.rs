//! Waits for the cluster by watches. Each wait has a deadline, and its error has the state seen last. Each also ends when the
//! machine of a node does.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Result, bail};
use futures::{AsyncBufReadExt, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::LogParams;
use kube::runtime::watcher::{self, Event as Change};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use testvm::excerpt::list;
use tokio::time::{Instant, sleep, timeout_at};

use super::node_vm::unless_node_ends;

/// The interval of retries after a log stream ended with its container or API server.
const LOG_RETRY: Duration = Duration::from_millis(500);

/// The state of a wait, decided from the watched objects.
#[derive(Debug)]
pub enum State {
    Ready,
    /// The condition does not hold yet; the text says what is missing.
    Pending(String),
    /// The condition can no longer hold; the text says why.
    Failed(String),
}

impl State {
    /// Returns `Ready` if the condition holds. Otherwise returns `Pending`, with the text that says what is missing.
    pub fn ready_if(condition: bool, pending: impl Into<String>) -> State {
        if condition { State::Ready } else { State::Pending(pending.into()) }
    }
}

/// Watches the objects that `scope` selects until `judge` returns `Ready`, and returns them.
pub async fn until<K>(
    api: Api<K>,
    scope: watch::Config,
    within: Duration,
    mut judge: impl FnMut(&BTreeMap<String, K>) -> State,
) -> Result<BTreeMap<String, K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let deadline = Instant::now() + within;
    let watched = async {
        let mut changes = pin!(watcher::watcher(api, scope).default_backoff());
        let mut objects = BTreeMap::new();
        let mut relisted = BTreeMap::new();
        let mut last = String::from("the API server has not responded");
        loop {
            match timeout_at(deadline, changes.next()).await {
                Err(_) => bail!("not within {within:?}: {last}"),
                Ok(None) => bail!("the watch ended: {last}"),
                // The watcher retries: the API server may be unavailable for a while.
                Ok(Some(Err(error))) => {
                    last = format!("the watch fails: {error}");
                    continue;
                }
                Ok(Some(Ok(Change::Init))) => {
                    relisted = BTreeMap::new();
                    continue;
                }
                Ok(Some(Ok(Change::InitApply(object)))) => {
                    relisted.insert(key(&object), object);
                    continue;
                }
                Ok(Some(Ok(Change::InitDone))) => objects = std::mem::take(&mut relisted),
                Ok(Some(Ok(Change::Apply(object)))) => drop(objects.insert(key(&object), object)),
                Ok(Some(Ok(Change::Delete(object)))) => drop(objects.remove(&key(&object))),
            }
            match judge(&objects) {
                State::Ready => return Ok(objects),
                State::Pending(what) => last = what,
                State::Failed(why) => bail!("{why}"),
            }
        }
    };
    unless_node_ends(watched).await
}

/// Waits like [`until`], for a single object. `judge` gets it if it exists.
pub async fn until_one<K>(
    api: Api<K>,
    name: &str,
    within: Duration,
    judge: impl Fn(Option<&K>) -> State,
) -> Result<Option<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let scope = watch::Config::default().fields(&format!("metadata.name={name}"));
    let objects = until(api, scope, within, |objects| judge(objects.values().next())).await?;
    Ok(objects.into_values().next())
}

/// Waits like [`until`], until all objects of these names exist and `complaint` returns nothing for any of
/// them, and returns them. `kind` is the name of the kind in messages.
pub async fn until_none_complains<K>(
    api: Api<K>,
    kind: &str,
    names: &[&str],
    within: Duration,
    complaint: impl Fn(&K) -> Option<String>,
) -> Result<Vec<K>>
where
    K: Resource<DynamicType: Default> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let named = |object: &K| names.contains(&object.name_any().as_str());
    let all = until(api, watch::Config::default(), within, |objects| {
        let ours: Vec<&K> = objects.values().filter(|object| named(object)).collect();
        if ours.len() < names.len() {
            return State::Pending(format!("{} of {} {kind}s exist", ours.len(), names.len()));
        }
        let complaints: Vec<String> = ours
            .iter()
            .filter_map(|object| Some(format!("{kind} {} {}", object.name_any(), complaint(object)?)))
            .collect();
        State::ready_if(complaints.is_empty(), list(&complaints))
    })
    .await?;
    Ok(all.into_values().filter(named).collect())
}

/// Waits until the API server serves the custom resources of these names.
pub async fn until_established(client: &Client, names: &[&str], within: Duration) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let complaint = |definition: &CustomResourceDefinition| {
        let status = definition.status.as_ref();
        let mut conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
        let established =
            conditions.any(|condition| condition.type_ == "Established" && condition.status == "True");
        (!established).then(|| format!("is not established: {status:?}"))
    };
    until_none_complains(definitions, "CustomResourceDefinition", names, within, complaint).await.map(drop)
}

/// Waits for an event about the object with one of these reasons and the expected message, and returns the
/// message.
pub async fn until_event<K>(
    client: &Client,
    about: &K,
    reasons: &[&str],
    within: Duration,
    as_it_should_be: impl Fn(&str) -> bool,
) -> Result<String>
where
    K: Resource<DynamicType = ()>,
{
    let kind = K::kind(&());
    let name = about.name_any();
    let mut fields = format!("involvedObject.kind={kind},involvedObject.name={name}");
    // Not those of an earlier object of this name. The events of a Node have its name as their UID.
    if let (Some(_), Some(uid)) = (about.namespace(), about.uid()) {
        fields += &format!(",involvedObject.uid={uid}");
    }
    let api: Api<Event> = match about.namespace() {
        Some(namespace) => Api::namespaced(client.clone(), &namespace),
        None => Api::all(client.clone()),
    };
    let message_of = |event: &Event| -> Option<String> {
        let message = event.message.clone().unwrap_or_default();
        let reason = event.reason.as_deref().unwrap_or_default();
        (reasons.contains(&reason) && as_it_should_be(&message)).then_some(message)
    };
    let events = until(api, watch::Config::default().fields(&fields), within, |events| {
        let seen = events.values().map(|event| {
            let (reason, message) = (event.reason.as_deref(), event.message.as_deref());
            format!("{}: {}", reason.unwrap_or_default(), message.unwrap_or_default())
        });
        State::ready_if(
            events.values().any(|event| message_of(event).is_some()),
            format!(
                "no such event of {reasons:?} about {kind} {name}; there are {:?}",
                seen.collect::<Vec<_>>()
            ),
        )
    })
    .await?;
    Ok(events.values().find_map(message_of).unwrap_or_default())
}

/// Reads a container's log as it is written, until `judge` accepts a line. `container` may be `None` if the
/// pod has only one.
pub async fn until_logged(
    pods: &Api<Pod>,
    pod: &str,
    container: Option<&str>,
    within: Duration,
    judge: impl Fn(&str) -> State,
) -> Result<()> {
    let deadline = Instant::now() + within;
    let logged = async {
        let mut last = String::from("nothing was logged");
        loop {
            let container = container.map(str::to_owned);
            let follow = LogParams { container, follow: true, ..LogParams::default() };
            match timeout_at(deadline, pods.log_stream(pod, &follow)).await {
                Err(_) => bail!("pod {pod}: not within {within:?}: {last}"),
                Ok(Err(error)) => last = format!("its log cannot be read: {error}"),
                Ok(Ok(stream)) => {
                    let mut lines = stream.lines();
                    loop {
                        match timeout_at(deadline, lines.try_next()).await {
                            Err(_) => bail!("pod {pod}: not within {within:?}: {last}"),
                            Ok(Ok(Some(line))) => match judge(&line) {
                                State::Ready => return Ok(()),
                                State::Pending(what) => last = what,
                                State::Failed(why) => bail!("pod {pod}: {why}"),
                            },
                            // The container or the connection ended: read the log again from the beginning.
                            Ok(Ok(None) | Err(_)) => break,
                        }
                    }
                }
            }
            if Instant::now() + LOG_RETRY > deadline {
                bail!("pod {pod}: not within {within:?}: {last}");
            }
            sleep(LOG_RETRY).await;
        }
    };
    unless_node_ends(logged).await
}

fn key<K: Resource>(object: &K) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}
