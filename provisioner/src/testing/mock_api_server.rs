//! A mock API server: a test declares the expected requests and the response to each.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use kube::runtime::reflector;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use loopfs::Bytes;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tower_test::mock;

use crate::api::cluster::Cluster;
use crate::api::events::{EventRequest, Events};
use crate::api::queue::KubernetesObject;
use crate::node::context::Context;
use crate::store::driver::VolumeError;
use crate::testing::fake_store::FakeStore;
use crate::testing::fixtures;

/// One complete expected request and its response.
#[derive(Debug)]
pub(crate) struct ExpectedRequest {
    method: Method,
    path: &'static str,
    body: Option<Value>,
    status: u16,
    response: Vec<u8>,
    pause: Option<(oneshot::Sender<()>, oneshot::Receiver<()>)>,
}

/// A request that has arrived, and whose response waits for the test.
pub(crate) struct Paused {
    /// Resolves when the request has arrived.
    pub(crate) requested: oneshot::Receiver<()>,
    /// Makes the server send the response.
    pub(crate) respond: oneshot::Sender<()>,
}

pub(crate) fn expect(method: Method, path: &'static str, body: impl Into<Option<Value>>) -> ExpectedRequest {
    ExpectedRequest { method, path, body: body.into(), status: 200, response: b"{}".to_vec(), pause: None }
}

impl ExpectedRequest {
    /// Responds with an object instead of an empty one.
    pub(crate) fn respond(mut self, object: impl serde::Serialize) -> Self {
        self.response = serde_json::to_vec(&object).unwrap();
        self
    }

    /// Responds with an error as the API server does, with details of the object that the path names.
    pub(crate) fn refuse(self, status: u16, reason: &str) -> Self {
        let details = details(self.path);
        self.refuse_saying(status, reason, &format!("refused: {reason}"), details)
    }

    /// Responds with an error whose text is `message`.
    pub(crate) fn refuse_saying(mut self, status: u16, reason: &str, message: &str, details: Value) -> Self {
        self.status = status;
        self.respond(json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason, "message": message,
            "details": details,
        }))
    }

    /// Delays the response until the test sends [`Paused::respond`].
    pub(crate) fn pause(mut self) -> (Self, Paused) {
        let (arrived, requested) = oneshot::channel();
        let (respond, responds) = oneshot::channel();
        self.pause = Some((arrived, responds));
        (self, Paused { requested, respond })
    }

    /// Responds with an error as a proxy in front of the API server does.
    pub(crate) fn refuse_by_proxy(mut self, status: u16) -> Self {
        self.status = status;
        self.response = b"<html>no such page</html>".to_vec();
        self
    }
}

fn details(path: &str) -> Value {
    let parts: Vec<_> = path.split('/').skip(1).collect();
    let (group, named) = match parts.as_slice() {
        ["api", _version, named @ ..] => ("", named),
        ["apis", group, _version, named @ ..] => (*group, named),
        _ => return Value::Null,
    };
    match named {
        ["namespaces", _, resource, name, ..] | [resource, name, ..] => {
            json!({"group": group, "kind": resource, "name": name})
        }
        _ => Value::Null,
    }
}

/// Returns the request that precedes each deletion of data but the first attempt to delete a released volume: it lists the
/// PersistentVolumes with the label of this node. None of them is returned.
pub(crate) fn labelled() -> ExpectedRequest {
    unlabelled(&[])
}

/// Returns the request that precedes each deletion of data: it lists the PersistentVolumes without a node label.
pub(crate) fn unlabelled(volumes: &[PersistentVolume]) -> ExpectedRequest {
    let list = json!({"kind": "PersistentVolumeList", "apiVersion": "v1", "metadata": {}, "items": volumes});
    expect(Method::GET, "/api/v1/persistentvolumes", None).respond(list)
}

/// Returns the request for the Node of this process, which precedes each deletion that follows from the absence of objects.
pub(crate) fn own_node(uid: &str) -> ExpectedRequest {
    let metadata = json!({"name": "node-a", "uid": uid});
    expect(Method::GET, "/api/v1/nodes/node-a", None).respond(fixtures::metadata_only(metadata))
}

/// A context with a fake store and a mock API server.
pub(crate) struct TestContext {
    pub(crate) ctx: Arc<Context>,
    pub(crate) volumes: Arc<FakeStore>,
    pub(crate) class_cache: Writer<StorageClass>,
    event_requests: mpsc::Receiver<EventRequest>,
    server: JoinHandle<()>,
}

#[derive(Default)]
pub(crate) struct Caches {
    pub(crate) claims: Vec<PersistentVolumeClaim>,
    pub(crate) volumes: Vec<PersistentVolume>,
    pub(crate) classes: Vec<StorageClass>,
}

/// Time to wait for the next request. A missing request fails a test, as an unexpected one does.
const TIMEOUT: Duration = Duration::from_secs(60);

impl TestContext {
    /// Returns a context with a store of 1 GiB and empty caches.
    pub(crate) fn new(requests: Vec<ExpectedRequest>) -> Self {
        Self::with(Caches::default(), requests)
    }

    /// Returns a context with a store of 1 GiB and these caches.
    pub(crate) fn with(caches: Caches, requests: Vec<ExpectedRequest>) -> Self {
        Self::of_size(Bytes(1 << 30), caches, requests)
    }

    pub(crate) fn of_size(size: Bytes, caches: Caches, requests: Vec<ExpectedRequest>) -> Self {
        let (service, handle) = mock::pair::<Request<Body>, Response<Body>>();
        let server = tokio::spawn(serve(handle, requests));
        let (events, event_requests) = Events::new(fixtures::identity().node());
        let volumes = Arc::new(FakeStore::of_size(size));
        let (classes, class_cache) = cache(caches.classes);
        let ctx = Arc::new(Context::new(
            Cluster { client: Client::new(service, "default"), identity: fixtures::identity(), events },
            volumes.clone(),
            cache(caches.claims).0,
            cache(caches.volumes).0,
            classes,
            || Timestamp::UNIX_EPOCH,
        ));
        ctx.storage.set(volumes.node_state().storage);
        for signal in [&ctx.claims.synced, &ctx.volumes.synced, &ctx.classes_synced] {
            signal.set(()).unwrap();
        }
        TestContext { ctx, volumes, class_cache, event_requests, server }
    }

    /// Lets all operations of the driver fail, and applies the state that the driver reports then.
    pub(crate) fn break_with(&self, error: VolumeError) {
        self.volumes.break_with(error);
        self.ctx.storage.set(self.volumes.node_state().storage);
    }

    /// Checks that all expected requests were received. Returns the reasons of the events, in order.
    pub(crate) async fn finish(self) -> Vec<&'static str> {
        self.events().await.iter().map(|event| event.reason.as_str()).collect()
    }

    /// Waits for all expected requests. Returns the events.
    pub(crate) async fn events(self) -> Vec<EventRequest> {
        let TestContext { ctx, mut event_requests, server, .. } = self;
        drop(ctx);
        tokio::time::timeout(TIMEOUT, server).await.expect("all expected requests arrive").unwrap();
        let mut events = Vec::new();
        while let Some(event) = event_requests.recv().await {
            events.push(event);
        }
        events
    }
}

async fn serve(mut handle: mock::Handle<Request<Body>, Response<Body>>, requests: Vec<ExpectedRequest>) {
    for expected in requests {
        let next = tokio::time::timeout(TIMEOUT, handle.next_request()).await;
        let (request, respond) =
            next.ok().flatten().unwrap_or_else(|| panic!("the provisioner did not send {expected:?}"));
        let (parts, body) = request.into_parts();
        assert_eq!((&parts.method, parts.uri.path()), (&expected.method, expected.path));
        let body = body.collect_bytes().await.unwrap();
        let body = (!body.is_empty()).then(|| serde_json::from_slice::<Value>(&body).unwrap());
        assert_eq!(body, expected.body, "{} {}", expected.method, expected.path);
        if let Some((arrived, responds)) = expected.pause {
            arrived.send(()).expect("the test waits for the request");
            responds.await.expect("the test sends the response");
        }
        let response = Body::from(expected.response);
        respond.send_response(Response::builder().status(expected.status).body(response).unwrap());
    }
    if let Some((request, _)) = handle.next_request().await {
        panic!("the provisioner also sent {} {}", request.method(), request.uri());
    }
}

/// Returns a cache that has received these objects as its first list.
pub(crate) fn cache<K: KubernetesObject>(objects: Vec<K>) -> (reflector::Store<K>, Writer<K>) {
    let (store, mut writer) = reflector::store();
    writer.apply_watcher_event(&Event::Init);
    for object in objects {
        writer.apply_watcher_event(&Event::InitApply(object));
    }
    writer.apply_watcher_event(&Event::InitDone);
    (store, writer)
}
