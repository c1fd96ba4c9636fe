//! The policy for a volume whose node was deleted: parameters of the class, recorded as annotations on the PersistentVolume.
//!
//! An administrator can change the annotations, and they outlive the class.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::objects::identity::Identity;

/// The action for a volume whose node was deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum OnNodeLoss {
    /// Report the volume in an event.
    #[default]
    Retain,
    /// Delete the PersistentVolume, which Kubernetes removes as soon as its claim is deleted.
    DeleteVolume,
    /// Delete the claim, and then the PersistentVolume. A claim that is created again gets a volume on another node.
    DeleteClaim,
}

impl OnNodeLoss {
    const ALL: [OnNodeLoss; 3] = [OnNodeLoss::Retain, OnNodeLoss::DeleteVolume, OnNodeLoss::DeleteClaim];

    fn parse(text: &str) -> Option<Self> {
        OnNodeLoss::ALL.into_iter().find(|policy| policy.as_str() == text)
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            OnNodeLoss::Retain => "retain",
            OnNodeLoss::DeleteVolume => "deleteVolume",
            OnNodeLoss::DeleteClaim => "deleteClaim",
        }
    }
}

/// The action, and how long the Node object must have been deleted before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) on_node_loss: OnNodeLoss,
    pub(crate) grace: Duration,
}

/// Default grace time. It is longer than it takes to reinstall a machine under its old name.
const GRACE: Duration = Duration::from_secs(30 * 60);

/// Allowed grace times, from one second, for trials, to a year.
const GRACE_SECONDS: std::ops::RangeInclusive<u64> = 1..=365 * 24 * 3600;

impl Default for Policy {
    fn default() -> Self {
        Policy { on_node_loss: OnNodeLoss::Retain, grace: GRACE }
    }
}

const PARAMETER: &str = "onNodeLoss";
const GRACE_PARAMETER: &str = "nodeLossGraceSeconds";

/// The parameters, as [`SettingsError`](csi_wire::SettingsError) lists them.
pub(crate) const ALLOWED: &[&str] = &[
    "onNodeLoss (retain, deleteVolume or deleteClaim)",
    "nodeLossGraceSeconds (seconds after the deletion of the Node object, a number from 1 to 31536000)",
];

impl Policy {
    /// Sets a parameter of a class. Returns `false` if it is no parameter of this policy.
    pub(crate) fn set(&mut self, parameter: &str, value: &str) -> Result<bool, String> {
        let wrong = || format!("{parameter} is {value:?}");
        match parameter {
            PARAMETER => self.on_node_loss = OnNodeLoss::parse(value).ok_or_else(wrong)?,
            GRACE_PARAMETER => self.grace = seconds(value).ok_or_else(wrong)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn annotation(identity: &Identity) -> String {
        format!("{}/on-node-loss", identity.driver())
    }

    /// Returns the annotations for a PersistentVolume; none if the policy is to retain it.
    pub(crate) fn annotations(&self, identity: &Identity) -> BTreeMap<String, String> {
        if self.on_node_loss == OnNodeLoss::Retain {
            return BTreeMap::new();
        }
        BTreeMap::from([
            (Self::annotation(identity), self.on_node_loss.as_str().to_owned()),
            (grace_annotation(identity), self.grace.as_secs().to_string()),
        ])
    }

    /// Returns the policy of a PersistentVolume. Annotations are untrusted input: an invalid value means the default policy.
    pub(crate) fn of(volume: &PersistentVolume, identity: &Identity) -> Self {
        let annotations = volume.metadata.annotations.as_ref();
        let grace = recorded_grace(annotations, identity);
        let recorded = annotations.and_then(|annotations| annotations.get(&Self::annotation(identity)));
        let on_node_loss = recorded.and_then(|text| OnNodeLoss::parse(text));
        match (on_node_loss, grace) {
            (Some(on_node_loss), Some(grace)) => Policy { on_node_loss, grace },
            (None, Some(grace)) => Policy { grace, ..Policy::default() },
            (_, None) => Policy::default(),
        }
    }
}

pub(crate) fn grace(annotations: Option<&BTreeMap<String, String>>, identity: &Identity) -> Duration {
    recorded_grace(annotations, identity).unwrap_or(GRACE)
}

/// Returns the grace time, or `None` if the annotation is invalid.
fn recorded_grace(annotations: Option<&BTreeMap<String, String>>, identity: &Identity) -> Option<Duration> {
    match annotations.and_then(|annotations| annotations.get(&grace_annotation(identity))) {
        Some(text) => seconds(text),
        None => Some(GRACE),
    }
}

fn seconds(text: &str) -> Option<Duration> {
    let seconds = text.parse().ok().filter(|seconds| GRACE_SECONDS.contains(seconds));
    seconds.map(Duration::from_secs)
}

fn grace_annotation(identity: &Identity) -> String {
    format!("{}/node-loss-grace-seconds", identity.driver())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn policy(on_node_loss: OnNodeLoss, seconds: u64) -> Policy {
        Policy { on_node_loss, grace: Duration::from_secs(seconds) }
    }

    #[rstest]
    #[case::none(json!({}), Policy::default())]
    #[case::both(json!({"csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "60"}), policy(OnNodeLoss::DeleteClaim, 60))]
    #[case::no_grace(json!({"csi.loopfs.dev/on-node-loss": "deleteVolume"}), policy(OnNodeLoss::DeleteVolume, 1800))]
    #[case::only_grace(json!({"csi.loopfs.dev/node-loss-grace-seconds": "60"}), policy(OnNodeLoss::Retain, 60))]
    #[case::nonsense(json!({"csi.loopfs.dev/on-node-loss": "DeleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "60"}), policy(OnNodeLoss::Retain, 60))]
    #[case::nonsense_grace(json!({"csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "1h"}), Policy::default())]
    #[case::no_time_at_all(json!({"csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "0"}), Policy::default())]
    #[case::endless(json!({"csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "18446744073709551615"}), Policy::default())]
    #[case::of_another_driver(json!({"csi.other.dev/on-node-loss": "deleteClaim"}), Policy::default())]
    fn policy_is_read_from_annotations(#[case] annotations: Value, #[case] expected: Policy) {
        let volume = fixtures::volume(json!({"metadata": {"annotations": annotations}}));
        assert_eq!(Policy::of(&volume, &fixtures::identity()), expected);
    }

    #[test]
    fn a_recorded_policy_is_read_back() {
        let deleting = policy(OnNodeLoss::DeleteClaim, 90);
        let annotations = json!(deleting.annotations(&fixtures::identity()));
        let volume = fixtures::volume(json!({"metadata": {"annotations": annotations}}));
        assert_eq!(Policy::of(&volume, &fixtures::identity()), deleting);
        assert!(Policy::default().annotations(&fixtures::identity()).is_empty());
    }
}
