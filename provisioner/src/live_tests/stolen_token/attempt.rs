//! The requests that the test makes with a stolen token, and the expected verdict of the API server on each.

use serde_json::Value;

use super::request::{AttackRequest, Verdict};
use crate::testing::fixtures;

/// The token that the API server receives with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// The token of a pod, which contains the name of the pod's node.
    OfPod,
    /// A token of the same account that was issued for no pod.
    Unbound,
}

/// The [`Verdict`] that the API server must return.
#[derive(Clone, Debug)]
pub(super) enum ExpectedVerdict {
    Allowed,
    /// No role grants the right.
    NotGranted,
    /// The role to be created or bound has rights that the account does not have.
    Escalation,
    /// The policy with this name refuses the request, and its message contains the words.
    Refused(&'static str, &'static str),
    /// The object is invalid, and the message contains the words.
    Invalid(&'static str),
    /// The account has the right, but the object does not exist.
    Absent,
    /// The account has the right, but the object exists already.
    Exists,
}

impl ExpectedVerdict {
    pub(super) fn matches(&self, verdict: &Verdict) -> bool {
        match (self, verdict) {
            (ExpectedVerdict::Allowed, Verdict::Allowed)
            | (ExpectedVerdict::NotGranted, Verdict::NotGranted)
            | (ExpectedVerdict::Escalation, Verdict::Escalation)
            | (ExpectedVerdict::Absent, Verdict::Absent)
            | (ExpectedVerdict::Exists, Verdict::Exists) => true,
            (ExpectedVerdict::Refused(expected, words), Verdict::Refused { policy, message }) => {
                expected == policy && message.contains(words)
            }
            (ExpectedVerdict::Invalid(words), Verdict::Invalid(message)) => message.contains(words),
            _ => false,
        }
    }
}

/// One request with its expected verdict.
#[derive(Clone, Debug)]
pub(super) struct AttackAttempt {
    pub(super) title: String,
    pub(super) token: Token,
    pub(super) request: AttackRequest,
    pub(super) expected: ExpectedVerdict,
    /// The verb and resource of a right that the API server requires besides the request's own, such as `bind` on a role.
    pub(super) additional_right: Option<(&'static str, &'static str)>,
}

#[derive(Default)]
pub(super) struct Attempts(pub(super) Vec<AttackAttempt>);

impl Attempts {
    /// Adds an attempt for each request, with the token of a pod.
    pub(super) fn expect(
        &mut self,
        expected: ExpectedVerdict,
        title: &str,
        requests: impl IntoIterator<Item = AttackRequest>,
    ) {
        self.0.extend(requests.into_iter().map(|request| AttackAttempt {
            title: title.to_owned(),
            token: Token::OfPod,
            request,
            expected: expected.clone(),
            additional_right: None,
        }));
    }

    /// Expects that the requests are allowed.
    pub(super) fn allow(&mut self, title: &str, requests: impl IntoIterator<Item = AttackRequest>) {
        self.expect(ExpectedVerdict::Allowed, title, requests);
    }

    /// Expects that `policy` refuses the request with a token that is bound to no node.
    pub(super) fn refuse_unbound(&mut self, policy: &'static str, title: &str, request: AttackRequest) {
        self.expect(ExpectedVerdict::Refused(policy, "token is not bound to a node"), title, [request]);
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

pub(super) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}
