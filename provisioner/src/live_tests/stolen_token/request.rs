//! Requests to the API server, as an attacker would write them, and the verdicts on them.

use std::fmt;

use http::Method;
use http::header::CONTENT_TYPE;
use kube::Client;
use serde_json::{Map, Value, json};

use crate::testing::fixtures;

/// A resource or a subresource, in one namespace or in the cluster's scope. All are served as version v1.
#[derive(Clone, Debug)]
pub(super) struct TargetResource {
    pub(super) group: &'static str,
    pub(super) kind: &'static str,
    /// The plural, with the subresource, as roles write it.
    pub(super) plural: String,
    pub(super) namespace: Option<String>,
}

impl TargetResource {
    pub(super) fn new(group: &'static str, kind: &'static str, plural: &str) -> Self {
        TargetResource { group, kind, plural: plural.to_owned(), namespace: None }
    }

    pub(super) fn within(&self, namespace: &str) -> Self {
        TargetResource { namespace: Some(namespace.to_owned()), ..self.clone() }
    }

    pub(super) fn subresource(&self, name: &str) -> Self {
        TargetResource { plural: format!("{}/{name}", self.plural), ..self.clone() }
    }

    /// Returns `true` for custom resources, for which the API server has no strategic merge patch.
    fn is_custom(&self) -> bool {
        self.group == "snapshot.storage.k8s.io"
    }

    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() { "v1".to_owned() } else { format!("{}/v1", self.group) }
    }

    /// Returns a request without a body. `object` is the name of the object, for the verbs that take one.
    pub(super) fn request(&self, verb: &'static str, object: Option<&str>) -> AttackRequest {
        let resource = self.clone();
        AttackRequest {
            verb,
            resource,
            object: object.map(str::to_owned),
            format: BodyFormat::Plain,
            body: None,
        }
    }

    pub(super) fn create(&self, object: Value) -> AttackRequest {
        let mut body = json!({"apiVersion": self.api_version(), "kind": self.kind});
        fixtures::merge_keeping_nulls(&mut body, object);
        AttackRequest { body: Some(body), ..self.request("create", None) }
    }

    pub(super) fn update(&self, object: Value) -> AttackRequest {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let created = self.create(object);
        AttackRequest { verb: "update", object: Some(name), ..created }
    }

    pub(super) fn patch(&self, name: &str, format: BodyFormat, body: Value) -> AttackRequest {
        AttackRequest { format, body: Some(body), ..self.request("patch", Some(name)) }
    }

    pub(super) fn delete(&self, name: &str) -> AttackRequest {
        self.request("delete", Some(name))
    }

    /// Returns a server-side apply of a whole object, which creates it if it does not exist.
    pub(super) fn apply(&self, object: Value) -> AttackRequest {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let created = self.create(object);
        AttackRequest { verb: "patch", object: Some(name), format: BodyFormat::Apply, ..created }
    }

    /// Returns the same change in each format of a patch that can express it.
    pub(super) fn patches(&self, current: &Value, change: &Value) -> Vec<AttackRequest> {
        let name = current["metadata"]["name"].as_str().unwrap_or_default();
        let mut requests = vec![
            self.patch(name, BodyFormat::Merge, change.clone()),
            self.patch(name, BodyFormat::Json, operations(current, change)),
        ];
        // These two formats add to lists instead of replacing them, and server-side apply does not remove a field that is null.
        if !contains(change, &|value| value.as_array().is_some_and(Vec::is_empty)) {
            if !self.is_custom() {
                requests.push(self.patch(name, BodyFormat::Strategic, change.clone()));
            }
            if !contains(change, &Value::is_null) {
                let mut whole = json!({"metadata": {"name": name}});
                fixtures::merge(&mut whole, change.clone());
                requests.push(self.apply(whole));
            }
        }
        requests
    }
}

/// Returns a merge patch as a JSON patch: one operation for each field of the metadata, the spec and the status.
fn operations(current: &Value, change: &Value) -> Value {
    let mut merged = current.clone();
    fixtures::merge(&mut merged, change.clone());
    let none = Map::new();
    let fields = |value: &Value, part: &str| {
        let fields = value[part].as_object().cloned();
        fields.unwrap_or_default()
    };
    let mut operations = Vec::new();
    for (part, value) in change.as_object().unwrap_or(&none) {
        match value.as_object().filter(|_| current[part].is_object()) {
            Some(changed) => operations.extend(changed.keys().filter_map(|field| {
                let path = format!("/{part}/{field}");
                match fields(&merged, part).get(field) {
                    Some(value) => Some(json!({"op": "add", "path": path, "value": value})),
                    None => fields(current, part)
                        .contains_key(field)
                        .then(|| json!({"op": "remove", "path": path})),
                }
            })),
            None => operations.push(json!({"op": "add", "path": format!("/{part}"), "value": merged[part]})),
        }
    }
    Value::Array(operations)
}

fn contains(value: &Value, predicate: &impl Fn(&Value) -> bool) -> bool {
    predicate(value)
        || match value {
            Value::Object(fields) => fields.values().any(|value| contains(value, predicate)),
            Value::Array(items) => items.iter().any(|value| contains(value, predicate)),
            _ => false,
        }
}

/// The form of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyFormat {
    /// The body is the object itself.
    Plain,
    Merge,
    Strategic,
    Json,
    Apply,
}

impl BodyFormat {
    fn content_type(self) -> &'static str {
        match self {
            BodyFormat::Plain => "application/json",
            BodyFormat::Merge => "application/merge-patch+json",
            BodyFormat::Strategic => "application/strategic-merge-patch+json",
            BodyFormat::Json => "application/json-patch+json",
            BodyFormat::Apply => "application/apply-patch+yaml",
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct AttackRequest {
    pub(super) verb: &'static str,
    pub(super) resource: TargetResource,
    pub(super) object: Option<String>,
    format: BodyFormat,
    body: Option<Value>,
}

impl fmt::Display for AttackRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource.plural)?;
        match self.format {
            BodyFormat::Plain => Ok(()),
            format => write!(f, " ({format:?})"),
        }
    }
}

impl AttackRequest {
    pub(super) fn named(self, object: Option<&str>) -> Self {
        AttackRequest { object: object.map(str::to_owned), ..self }
    }

    /// Sends the request. A write is a dry run: it passes authorization, validation and admission, and changes nothing.
    pub(super) async fn send(&self, client: &Client) -> Verdict {
        match client.request_stream(self.http()).await {
            // A watch does not end. Its head is the response.
            Ok(_answered) => Verdict::Allowed,
            Err(error) => Verdict::of(error),
        }
    }

    fn http(&self) -> http::Request<Vec<u8>> {
        let (method, query) = match self.verb {
            "get" | "list" => (Method::GET, ""),
            "watch" => (Method::GET, "watch=true"),
            "create" => (Method::POST, "dryRun=All"),
            "update" => (Method::PUT, "dryRun=All"),
            "patch" if self.format == BodyFormat::Apply => {
                (Method::PATCH, "dryRun=All&fieldManager=thief&force=true")
            }
            "patch" => (Method::PATCH, "dryRun=All"),
            "delete" | "deletecollection" => (Method::DELETE, "dryRun=All"),
            verb => panic!("no such verb of the API server: {verb}"),
        };
        let mut query = query.to_owned();
        if let Some(name) = self.object.as_ref().filter(|_| self.lists()) {
            query += &format!("&fieldSelector=metadata.name={name}");
        }
        let body = self.body.as_ref().map(|body| serde_json::to_vec(body).unwrap()).unwrap_or_default();
        http::Request::builder()
            .method(method)
            .uri(format!("{}?{query}", self.path()))
            .header(CONTENT_TYPE, self.format.content_type())
            .body(body)
            .unwrap()
    }

    /// Returns `true` if the request is for all objects, of which a name selects one.
    fn lists(&self) -> bool {
        ["list", "watch"].contains(&self.verb)
    }

    fn path(&self) -> String {
        let TargetResource { group, plural, namespace, .. } = &self.resource;
        let mut path = if group.is_empty() { "/api/v1".to_owned() } else { format!("/apis/{group}/v1") };
        if let Some(namespace) = namespace {
            path += &format!("/namespaces/{namespace}");
        }
        let (plural, subresource) = match plural.split_once('/') {
            Some((plural, subresource)) => (plural, Some(subresource)),
            None => (plural.as_str(), None),
        };
        let object = self.object.as_deref().filter(|_| !self.lists());
        let parts = [Some(plural), object, subresource];
        parts.into_iter().flatten().fold(path, |path, part| format!("{path}/{part}"))
    }
}

/// The response of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Allowed,
    /// No role grants the request.
    NotGranted,
    /// The API server protects the roles themselves: the account would grant rights that it does not have.
    Escalation,
    /// A rule of an admission policy refuses the request.
    Refused {
        policy: String,
        message: String,
    },
    /// The object is not valid, no matter which account sends it.
    Invalid(String),
    /// Nothing refuses the request, but there is no such object, or no such resource in this cluster.
    Absent,
    /// Nothing refuses the request, but the object exists.
    Exists,
    Other(String),
}

impl Verdict {
    /// Returns the verdict that a rule of a policy refuses a request. `message` may be a part of the rule's message.
    pub(super) fn refused(policy: &str, message: &str) -> Self {
        Verdict::Refused { policy: policy.to_owned(), message: message.to_owned() }
    }

    /// Returns `true` if the verdict is the expected one, and its message contains the expected one's.
    pub(super) fn is(&self, expected: &Verdict) -> bool {
        match (self, expected) {
            (Verdict::Refused { policy, message }, Verdict::Refused { policy: expected, message: words }) => {
                policy == expected && message.contains(words)
            }
            (Verdict::Invalid(message), Verdict::Invalid(words)) => message.contains(words),
            _ => self == expected,
        }
    }

    /// Returns `true` if authorization and admission let the request pass.
    pub(super) fn allows(&self) -> bool {
        matches!(self, Verdict::Allowed | Verdict::Absent | Verdict::Exists)
    }

    fn of(error: kube::Error) -> Self {
        let kube::Error::Api(status) = error else { return Verdict::Other(error.to_string()) };
        let message = status.message.clone();
        if let Some((_, denied)) = message.split_once("ValidatingAdmissionPolicy '")
            && let Some((policy, rest)) = denied.split_once('\'')
            && let Some((_, message)) = rest.split_once(" denied request: ")
        {
            return Verdict::refused(policy, message);
        }
        let escalates =
            ["attempting to grant RBAC permissions not currently held", "to use the aggregationRule"];
        match status.code {
            403 if escalates.iter().any(|words| message.contains(words)) => Verdict::Escalation,
            403 => Verdict::NotGranted,
            404 => Verdict::Absent,
            409 if status.reason == "AlreadyExists" => Verdict::Exists,
            422 => Verdict::Invalid(message),
            code => Verdict::Other(format!("{code} {message}")),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Allowed => write!(f, "allowed"),
            Verdict::NotGranted => write!(f, "denied by RBAC"),
            Verdict::Escalation => write!(f, "denied by RBAC: escalation"),
            Verdict::Refused { policy, message } => write!(f, "denied by {policy}: {message}"),
            Verdict::Invalid(message) => write!(f, "denied as invalid: {message}"),
            Verdict::Absent => write!(f, "allowed: does not exist"),
            Verdict::Exists => write!(f, "allowed: exists"),
            Verdict::Other(message) => write!(f, "{message}"),
        }
    }
}
