//! Requests to the API server, as roles name them.

use http::{Method, Request, Uri};
use kube::client::Body;
use tower::layer::layer_fn;
use tower::{BoxError, Layer, Service, service_fn};

/// What a role must permit for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiRequest {
    /// One of `get`, `list`, `watch`, `create`, `update`, `patch` and `delete`, or `dry-run` for any of the last four that changes
    /// nothing.
    pub(crate) verb: &'static str,
    /// The plural of the resource, with its subresource. Empty for paths of no resource, such as `/version`. This process uses
    /// few resources, so metrics with this label have few time series.
    pub(crate) resource: String,
}

impl ApiRequest {
    pub(crate) fn of(method: &Method, uri: &Uri) -> Self {
        let parts = resource_path(uri.path());
        let resource = match parts.as_slice() {
            [resource, _name, subresource, ..] => format!("{resource}/{subresource}"),
            [resource, ..] => (*resource).to_owned(),
            [] => String::new(),
        };
        let verb = match *method {
            _ if has_parameter(uri, "dryRun=All") => "dry-run",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ if is_watch(uri) => "watch",
            _ if parts.len() == 1 => "list",
            _ => "get",
        };
        ApiRequest { verb, resource }
    }

    pub(crate) fn is_write(&self) -> bool {
        !["get", "list", "watch", "dry-run"].contains(&self.verb)
    }
}

/// Returns a layer whose service passes each request to `handle`, with a clone of the service below.
pub(crate) fn layer<S: Clone, T, Sending: Future<Output = Result<T, BoxError>>>(
    handle: impl Fn(S, Request<Body>) -> Sending + Clone,
) -> impl Layer<S, Service = impl Service<Request<Body>, Response = T, Error = BoxError, Future = Sending> + Clone>
{
    layer_fn(move |service: S| {
        let handle = handle.clone();
        service_fn(move |request| handle(service.clone(), request))
    })
}

/// Returns `true` if the response lasts until the API server ends it.
pub(crate) fn is_watch(uri: &Uri) -> bool {
    has_parameter(uri, "watch=true")
}

fn has_parameter(uri: &Uri, parameter: &str) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|pair| pair == parameter))
}

/// Returns the resource, the name and the subresource in a path, without group, version and namespace.
fn resource_path(path: &str) -> Vec<&str> {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    let group_and_version = if parts.next() == Some("apis") { 2 } else { 1 };
    let rest: Vec<_> = parts.skip(group_and_version).collect();
    match rest.as_slice() {
        ["namespaces", _namespace, namespaced @ ..] if !namespaced.is_empty() => namespaced.to_vec(),
        _ => rest,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::cluster("GET", "/api/v1/persistentvolumes?limit=500", "list", "persistentvolumes")]
    #[case::named("GET", "/api/v1/persistentvolumes/pvc-1", "get", "persistentvolumes")]
    #[case::watch("GET", "/api/v1/persistentvolumes?watch=true&limit=500", "watch", "persistentvolumes")]
    #[case::namespaced("POST", "/apis/events.k8s.io/v1/namespaces/shop/events", "create", "events")]
    #[case::status(
        "PATCH",
        "/api/v1/namespaces/shop/persistentvolumeclaims/data/status",
        "patch",
        "persistentvolumeclaims/status"
    )]
    #[case::a_namespace("DELETE", "/api/v1/namespaces/shop", "delete", "namespaces")]
    #[case::replaced("PUT", "/api/v1/nodes/node-a", "update", "nodes")]
    #[case::dry_run("POST", "/api/v1/persistentvolumes?&dryRun=All", "dry-run", "persistentvolumes")]
    #[case::nothing("GET", "/", "get", "")]
    #[case::version("GET", "/version", "get", "")]
    fn verbs_and_resources(
        #[case] method: Method,
        #[case] uri: Uri,
        #[case] verb: &'static str,
        #[case] resource: &str,
    ) {
        let request = ApiRequest::of(&method, &uri);
        assert_eq!(request, ApiRequest { verb, resource: resource.to_owned() });
        assert_eq!(request.is_write(), method != Method::GET && verb != "dry-run");
    }
}
