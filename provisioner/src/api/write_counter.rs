//! Counts the writes to the API server in the client.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{Method, Request, Response};
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tower::{Layer, Service};

/// Counter of all writes since the process started.
#[derive(Clone, Debug, Default)]
pub(crate) struct ApiWrites {
    ended: Family<[(&'static str, String); 3], Counter>,
}

impl ApiWrites {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Writes to the API server, by HTTP status; without a status, there was no response";
        registry.register("api_writes", help, self.ended.clone());
    }

    pub(crate) fn ended(&self, verb: &'static str, resource: String, code: String) {
        self.ended.get_or_create(&[("verb", verb.to_owned()), ("resource", resource), ("code", code)]).inc();
    }
}

impl<S> Layer<S> for ApiWrites {
    type Service = Counted<S>;

    fn layer(&self, service: S) -> Counted<S> {
        Counted { service, writes: self.clone() }
    }
}

/// A service whose writes are counted.
#[derive(Debug)]
pub(crate) struct Counted<S> {
    service: S,
    writes: ApiWrites,
}

impl<S, Body, ResponseBody> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<ResponseBody>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let write = verb(request.method()).map(|verb| (verb, resource(request.uri().path())));
        let (response, writes) = (self.service.call(request), self.writes.clone());
        Box::pin(async move {
            let response = response.await;
            if let Some((verb, resource)) = write {
                let code = response.as_ref().map(|response| response.status().as_str().to_owned());
                writes.ended(verb, resource, code.unwrap_or_default());
            }
            response
        })
    }
}

/// Returns the RBAC verb of a write, or `None` for a read.
pub(crate) fn verb(method: &Method) -> Option<&'static str> {
    match *method {
        Method::POST => Some("create"),
        Method::PUT => Some("update"),
        Method::PATCH => Some("patch"),
        Method::DELETE => Some("delete"),
        _ => None,
    }
}

/// Returns the resource of a path with its subresource, as RBAC names it. This process uses few resources, so
/// there are few time series.
pub(crate) fn resource(path: &str) -> String {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    let groups = if parts.next() == Some("apis") { 2 } else { 1 };
    let rest: Vec<_> = parts.skip(groups).collect();
    let named = match rest.as_slice() {
        ["namespaces", _namespace, named @ ..] if !named.is_empty() => named,
        named => named,
    };
    match named {
        [resource, _name, subresource, ..] => format!("{resource}/{subresource}"),
        [resource, ..] => (*resource).to_owned(),
        [] => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use rstest::rstest;
    use tower_test::mock;

    use super::*;

    #[rstest]
    #[case::cluster("/api/v1/persistentvolumes", "persistentvolumes")]
    #[case::named("/api/v1/persistentvolumes/pvc-1", "persistentvolumes")]
    #[case::namespaced("/apis/events.k8s.io/v1/namespaces/shop/events", "events")]
    #[case::status(
        "/api/v1/namespaces/shop/persistentvolumeclaims/data/status",
        "persistentvolumeclaims/status"
    )]
    #[case::a_namespace("/api/v1/namespaces/shop", "namespaces")]
    #[case::nothing("/", "")]
    fn resources(#[case] path: &str, #[case] expected: &str) {
        assert_eq!(resource(path), expected);
    }

    #[tokio::test]
    async fn writes_are_counted_by_status_and_reads_are_not_counted() {
        let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
        let writes = ApiWrites::default();
        let mut counted = writes.layer(service);
        for (method, status) in [(Method::GET, 200), (Method::PATCH, 409), (Method::DELETE, 200)] {
            std::future::poll_fn(|context| counted.poll_ready(context)).await.unwrap();
            let path = "https://api.test/api/v1/persistentvolumes/pvc-1";
            let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
            let responding = async {
                let (_request, respond) = handle.next_request().await.unwrap();
                respond.send_response(Response::builder().status(status).body(Body::empty()).unwrap());
            };
            let (response, ()) = tokio::join!(counted.call(request), responding);
            assert_eq!(response.unwrap().status(), status);
        }
        let mut registry = Registry::default();
        writes.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let mut lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            [
                r#"api_writes_total{verb="delete",resource="persistentvolumes",code="200"} 1"#,
                r#"api_writes_total{verb="patch",resource="persistentvolumes",code="409"} 1"#,
            ]
        );
    }
}
