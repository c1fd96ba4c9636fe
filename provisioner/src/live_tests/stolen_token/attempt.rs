//! The requests that the test makes with a stolen token, and the expected verdict of the API server on each.

use serde_json::{Value, json};

use super::request::{AttackRequest, Verdict};
use crate::testing::fixtures;

/// A finalizer of another program.
pub(super) const KEEP: &str = "example.com/keep";

/// The token that the API server receives with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// The token of a pod, which contains the name of the pod's node.
    OfPod,
    /// A token of the same account that was issued for no pod.
    Unbound,
}

/// One request with its expected verdict.
#[derive(Clone, Debug)]
pub(super) struct AttackAttempt {
    pub(super) title: String,
    pub(super) token: Token,
    pub(super) request: AttackRequest,
    /// The message of the verdict contains that of the expected one.
    pub(super) expected: Verdict,
    /// The verb and resource of a right that the API server requires besides the request's own, such as `bind` on a role.
    pub(super) additional_right: Option<(&'static str, &'static str)>,
}

#[derive(Default)]
pub(super) struct Attempts(pub(super) Vec<AttackAttempt>);

impl Attempts {
    /// Adds an attempt for each request, with the token of a pod.
    pub(super) fn expect(
        &mut self,
        expected: Verdict,
        title: impl Into<String>,
        requests: impl IntoIterator<Item = AttackRequest>,
    ) {
        let title = title.into();
        self.0.extend(requests.into_iter().map(|request| AttackAttempt {
            title: title.clone(),
            token: Token::OfPod,
            request,
            expected: expected.clone(),
            additional_right: None,
        }));
    }

    pub(super) fn allow(
        &mut self,
        title: impl Into<String>,
        requests: impl IntoIterator<Item = AttackRequest>,
    ) {
        self.expect(Verdict::Allowed, title, requests);
    }

    /// Expects that `policy` refuses the request with a token that is bound to no node.
    pub(super) fn refuse_unbound(
        &mut self,
        policy: &'static str,
        title: impl Into<String>,
        request: AttackRequest,
    ) {
        self.expect(Verdict::refused(policy, "token is not bound to a node"), title, [request]);
        self.unbound();
    }

    /// Makes the last attempt use a token that is bound to no node.
    pub(super) fn unbound(&mut self) {
        self.0.last_mut().unwrap().token = Token::Unbound;
    }

    /// Records that the last `count` attempts need this right besides that of their request.
    pub(super) fn also(&mut self, count: usize, verb: &'static str, resource: &'static str) {
        for attempt in self.0.iter_mut().rev().take(count) {
            attempt.additional_right = Some((verb, resource));
        }
    }
}

/// Returns an object after a JSON merge patch, in which null removes a member.
pub(super) fn changed(object: &Value, change: Value) -> Value {
    let mut changed = object.clone();
    fixtures::merge(&mut changed, change);
    changed
}

pub(super) fn metadata(change: Value) -> Value {
    json!({"metadata": change})
}

pub(super) fn spec(change: Value) -> Value {
    json!({"spec": change})
}

/// Returns a change that sets a label. Null removes it.
pub(super) fn label(key: &str, value: impl Into<Value>) -> Value {
    metadata(json!({"labels": {key: value.into()}}))
}

/// Returns a change that sets an annotation. Null removes it.
pub(super) fn annotation(key: &str, value: impl Into<Value>) -> Value {
    metadata(json!({"annotations": {key: value.into()}}))
}

pub(super) fn finalizers(names: &[&str]) -> Value {
    metadata(json!({"finalizers": names}))
}

/// Returns a change that sets the only owner.
pub(super) fn owner(reference: Value) -> Value {
    metadata(json!({"ownerReferences": [reference]}))
}

pub(super) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}
