//! Requests to the API server, as roles name them.

use http::request::Parts;
use serde_json::Value;

use crate::api::request::ApiRequest;

/// A request to the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::live_tests) struct Call {
    /// The verb, or `event` for an event that the client of a watch receives.
    pub(in crate::live_tests) verb: &'static str,
    /// The plural of the resource with the subresource. Empty for requests of no resource, such as `/version`.
    pub(in crate::live_tests) resource: String,
    /// The name of the object. Empty for lists and watches.
    pub(in crate::live_tests) name: String,
    /// The percent-encoded label selector of a list or watch.
    pub(in crate::live_tests) selector: String,
    /// The resource version from which a watch continues, or that of an event.
    pub(in crate::live_tests) version: String,
}

impl Call {
    pub(super) fn of(request: &Parts, body: &[u8]) -> Self {
        let path = request.uri.path();
        let ApiRequest { verb, resource } = ApiRequest::of(&request.method, &request.uri);
        let plural = resource.split('/').next().unwrap_or_default();
        let in_path = path.split('/').skip_while(|part| plural.is_empty() || *part != plural).nth(1);
        let name = match in_path {
            Some(name) => name.to_owned(),
            // The object of a creation is in its body.
            None => named(body).unwrap_or_default(),
        };
        let parameter = |key: &str| {
            let query = request.uri.query().unwrap_or_default();
            query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
        };
        let (selector, version) =
            (parameter("labelSelector").to_owned(), parameter("resourceVersion").to_owned());
        Call { verb, resource, name, selector, version }
    }

    pub(in crate::live_tests) fn is(&self, verb: &str, resource: &str) -> bool {
        self.verb == verb && self.resource == resource
    }

    pub(in crate::live_tests) fn is_write(&self) -> bool {
        !["get", "list", "watch", "event", "dry-run"].contains(&self.verb)
    }
}

fn named(body: &[u8]) -> Option<String> {
    let object: Value = serde_json::from_slice(body).ok()?;
    Some(object.get("metadata")?.get("name")?.as_str()?.to_owned())
}
