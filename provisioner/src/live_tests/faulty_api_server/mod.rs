//! A faulty API server: a proxy in front of the real one, through which the provisioner of a node sends its requests.
//!
//! Requests that reach the real API server carry the provisioner's own token, so its rights and the admission policies are real.
//! A rule of the test decides about the fault of each request and of each event of a watch.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use futures::stream;
use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::Client;
use kube::client::ConfigExt;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

pub(super) use self::call::Call;
pub(super) use self::fault::Fault;
use super::{HERE, Provisioner, TIMEOUT, TestCluster};
use crate::api::client;
use crate::api::connection::{self, Timeouts};
use crate::api::traffic::ApiTraffic;
use crate::node::process::Options;
use crate::testing::fake_store::FakeStore;

mod call;
mod fault;
mod watch_body;

/// Returns the fault of a request, or of the next event of a watch.
type Rule = Arc<dyn Fn(&Call) -> Option<Fault> + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, io::Error>;
type Forward = dyn Fn(Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Incoming>, legacy::Error>>
    + Send
    + Sync;

/// A proxy between the provisioner of a node and the API server.
pub(super) struct FaultyApiServer {
    shared: Arc<ProxyState>,
    kubeconfig: PathBuf,
    _accepting: AbortOnDropHandle<()>,
}

struct ProxyState {
    /// Sends a request to the real API server.
    forward: Box<Forward>,
    server: Uri,
    rule: watch::Sender<Rule>,
    /// The calls that have a response, or whose fault was decided, in order. Of a watch: its start, and
    /// each event and fault.
    calls: watch::Sender<Vec<(Call, Option<Fault>)>>,
    /// The first response to each list, by resource and selector.
    lists: Mutex<HashMap<(String, String), Bytes>>,
}

impl FaultyApiServer {
    /// Starts a proxy for the provisioner of a node.
    pub(super) async fn before(cluster: &TestCluster, node: &str) -> Self {
        Self::in_front_of(cluster, TestCluster::kubeconfig_of(node)).await
    }

    /// Starts a proxy without faults, and writes a kubeconfig that names it instead of the API server.
    pub(super) async fn in_front_of(cluster: &TestCluster, real: PathBuf) -> Self {
        let config = client::config(Some(real.clone())).await.unwrap();
        let connections = legacy::Client::builder(TokioExecutor::new())
            .build::<_, Full<Bytes>>(config.rustls_https_connector().unwrap());
        let no_faults: Rule = Arc::new(|_call| None);
        let shared = Arc::new(ProxyState {
            forward: Box::new(move |request| Box::pin(connections.request(request))),
            server: config.cluster_url.clone(),
            rule: watch::Sender::new(no_faults),
            calls: watch::Sender::default(),
            lists: Mutex::default(),
        });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let own = format!("http://{}", listener.local_addr().unwrap());
        let text = std::fs::read_to_string(&real).unwrap();
        let text = text.replace(config.cluster_url.to_string().trim_end_matches('/'), &own);
        let kubeconfig = cluster.scratch.path().join(real.file_name().unwrap()).with_extension("faulty");
        std::fs::write(&kubeconfig, text).unwrap();
        let accepting = AbortOnDropHandle::new(tokio::spawn(accept(listener, Arc::clone(&shared))));
        FaultyApiServer { shared, kubeconfig, _accepting: accepting }
    }

    /// Sets the rule for all further requests, and for all further events of the watches in progress.
    pub(super) fn set(&self, rule: impl Fn(&Call) -> Option<Fault> + Send + Sync + 'static) {
        self.shared.rule.send_replace(Arc::new(rule));
    }

    /// Sets a fault of all calls at the moment when the store has created a volume.
    pub(super) fn set_once_created(&self, volumes: &FakeStore, fault: Fault) {
        let rule = self.shared.rule.clone();
        volumes.once_created(move || drop(rule.send_replace(Arc::new(move |_call| Some(fault)))));
    }

    /// Ends all faults. A silent connection stays silent.
    pub(super) fn heal(&self) {
        self.set(|_call| None);
    }

    /// Returns the number of calls so far, for [`Self::until`].
    pub(super) fn now(&self) -> usize {
        self.shared.calls.borrow().len()
    }

    /// Returns how many calls since a moment are selected.
    pub(super) fn count(&self, since: usize, selected: impl Fn(&Call, Option<Fault>) -> bool) -> usize {
        count(&self.shared.calls.borrow()[since..], &selected)
    }

    /// Waits until this many calls since a moment are selected.
    pub(super) async fn until(
        &self,
        since: usize,
        times: usize,
        what: &str,
        selected: impl Fn(&Call, Option<Fault>) -> bool,
    ) {
        let mut calls = self.shared.calls.subscribe();
        let enough = calls.wait_for(|calls| count(&calls[since..], &selected) >= times);
        if timeout(TIMEOUT, enough).await.is_err() {
            let calls = self.shared.calls.borrow();
            let latest: Vec<_> = calls.iter().rev().take(20).map(|call| format!("{call:?}")).collect();
            panic!("not in time, {times} times: {what}; the latest calls first: {latest:#?}");
        }
    }

    /// Returns a client with the rights of the provisioner whose requests pass through this proxy.
    pub(super) async fn client(&self, timeouts: Timeouts, traffic: &ApiTraffic) -> Client {
        let config = client::config(Some(self.kubeconfig.clone())).await.unwrap();
        connection::client(config, timeouts, traffic).unwrap()
    }

    /// Starts the provisioner of the usual node. Its requests pass through this proxy.
    pub(super) async fn provisioner(
        &self,
        cluster: &TestCluster,
        timeouts: Timeouts,
        options: Options,
    ) -> Provisioner {
        let traffic = ApiTraffic::default();
        let client = self.client(timeouts, &traffic).await;
        cluster.start(HERE, &cluster.volumes, options, client, traffic).await
    }
}

fn count(calls: &[(Call, Option<Fault>)], selected: impl Fn(&Call, Option<Fault>) -> bool) -> usize {
    calls.iter().filter(|(call, fault)| selected(call, *fault)).count()
}

async fn accept(listener: TcpListener, shared: Arc<ProxyState>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _peer)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(|request| respond(Arc::clone(&shared), request));
            // An error ends the connection, which is what a fault requests.
            http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
        });
    }
}

async fn respond(shared: Arc<ProxyState>, request: Request<Incoming>) -> io::Result<Response<Body>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let call = Call::of(&parts, &body);
    // Changes of the rule from here on concern the events of a watch.
    let mut rules = shared.rule.subscribe();
    let mut fault = shared.decide(&call);
    if fault == Some(Fault::Late) {
        rules.wait_for(|rule| rule(&call) != Some(Fault::Late)).await.map_err(io::Error::other)?;
        fault = None;
    }
    match fault {
        Some(Fault::Silence) => std::future::pending().await,
        Some(Fault::Disconnect) => return Err(cut()),
        Some(Fault::Gone) if call.verb == "watch" => {
            return Ok(Response::new(full(fault.and_then(Fault::last_event).unwrap_or_default())));
        }
        Some(Fault::StaleList) => {
            if let Some(list) = shared.recorded(&call) {
                return Ok(Response::new(full(list)));
            }
        }
        Some(fault) if !fault.is_forwarded() => {
            if let Some(response) = fault.response(&call) {
                return Ok(response.map(full));
            }
        }
        _ => {}
    }
    let response = shared.send(parts, body, fault == Some(Fault::ExpiredToken)).await?;
    if call.verb == "watch" && response.status().is_success() {
        if fault.is_none() {
            shared.log(&call, None);
        }
        let body = |body| StreamBody::new(watch_body::stream(call, body, shared, rules)).boxed_unsync();
        return Ok(response.map(body));
    }
    let (head, body) = response.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    if call.verb == "list" && head.status.is_success() {
        shared.record(&call, &body);
    }
    if fault.is_none() {
        shared.log(&call, None);
    }
    let body = match fault {
        Some(Fault::HalfBody) => half_of(body),
        Some(Fault::TruncatedJson) => full(body.slice(..body.len() / 2)),
        Some(Fault::LostResponse) => {
            return Ok(Fault::LostResponse.response(&call).expect("a response").map(full));
        }
        _ => full(body),
    };
    Ok(Response::from_parts(head, body))
}

impl ProxyState {
    /// Returns the fault of a call or of the next event of a watch.
    fn decide(&self, call: &Call) -> Option<Fault> {
        let rule = Arc::clone(&self.rule.borrow());
        let fault = rule(call);
        if fault.is_some() {
            self.log(call, fault);
        }
        fault
    }

    fn log(&self, call: &Call, fault: Option<Fault>) {
        self.calls.send_modify(|calls| calls.push((call.clone(), fault)));
    }

    fn record(&self, list: &Call, body: &Bytes) {
        let key = (list.resource.clone(), list.selector.clone());
        self.lists.lock().unwrap().entry(key).or_insert_with(|| body.clone());
    }

    fn recorded(&self, list: &Call) -> Option<Bytes> {
        self.lists.lock().unwrap().get(&(list.resource.clone(), list.selector.clone())).cloned()
    }

    /// Sends a request to the real API server. The body of the response has its own framing.
    async fn send(&self, parts: Parts, body: Bytes, is_expired: bool) -> io::Result<Response<Incoming>> {
        let mut request = Request::from_parts(parts, Full::new(body));
        let mut uri = self.server.clone().into_parts();
        uri.path_and_query = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from_parts(uri).map_err(io::Error::other)?;
        for header in [HOST, CONTENT_LENGTH, TRANSFER_ENCODING] {
            request.headers_mut().remove(header);
        }
        if is_expired {
            request.headers_mut().insert("authorization", HeaderValue::from_static("Bearer expired"));
        }
        let mut response = (self.forward)(request).await.map_err(io::Error::other)?;
        for header in [CONTENT_LENGTH, TRANSFER_ENCODING] {
            response.headers_mut().remove(header);
        }
        Ok(response)
    }
}

fn full(body: Bytes) -> Body {
    Full::new(body).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// Returns a body that ends in the middle, and with it the connection.
fn half_of(body: Bytes) -> Body {
    let half = Ok(Frame::data(body.slice(..body.len() / 2)));
    StreamBody::new(stream::iter([half, Err(cut())])).boxed_unsync()
}

fn cut() -> io::Error {
    io::Error::other("the connection is cut")
}
