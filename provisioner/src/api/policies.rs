//! Checks that the API server enforces the admission policies of the manifests for this process.
//!
//! The policies match the accounts of the driver by their names. If an account has another name, or a policy was removed, the API server
//! allows every request as before, and nothing else shows that a stolen token of one node reaches the volumes of all nodes. Therefore
//! each process sends a request that a policy must refuse. It is a dry run, so it changes nothing if no policy refuses it.
//!
//! kube sends dry runs, and does not tell which policy refused one.
//!
//! The process serves in any case: an administrator may have removed the policies on purpose, and a driver that stops does not make the
//! token any safer.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::PostParams;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use service::Gauges;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::api::cluster::Cluster;
use crate::api::events::Reason;
use crate::objects::identity::Identity;

/// The wait after the API server refused the request. A policy can be removed later.
const CHECK_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// The wait after any other response.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// The number of consecutive requests that the API server must allow before that is reported. Policies take a moment to be in force, and
/// Helm creates them after the pods.
const ALLOWED_MAX: u32 = 4;

/// The name of the objects that the requests would create.
pub(crate) const NAME: &str = "loopfs-policy-check";
/// The node of the PersistentVolume. No node has this name, because names of nodes have no upper case.
const ANOTHER_NODE: &str = "Another-Node";

/// `Some(true)` if the API server refuses the request, `Some(false)` if it does not, and `None` while neither is known.
pub(crate) type Enforced = Option<bool>;

/// A request that a policy must refuse, and for which the account has the right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Forbidden {
    /// The provisioner of a node creates a PersistentVolume of another node.
    VolumeOfAnotherNode,
    /// A replica of the controller creates a Lease in its namespace that is not its own.
    AnotherLease { namespace: String },
}

impl Forbidden {
    /// Returns the policy that must refuse the request.
    pub(crate) fn policy(&self) -> &'static str {
        match self {
            Forbidden::VolumeOfAnotherNode => "loopfs-provisioner-volumes",
            Forbidden::AnotherLease { .. } => "loopfs-controller-lease",
        }
    }

    /// Returns the fault for the administrator, after the API server has allowed the request.
    fn fault(&self) -> String {
        let (request, account) = match self {
            Forbidden::VolumeOfAnotherNode => ("a PersistentVolume of another node", "loopfs-provisioner"),
            Forbidden::AnotherLease { .. } => ("a Lease of another name", "loopfs-controller"),
        };
        format!(
            "the API server does not enforce the admission policies: in a dry run, the policy {} did not refuse to create {request}; an \
             attacker who has the token of one node can change the volumes and claims of all nodes; apply the policies of csi/deploy and of \
             its components again, and let the account of this pod have the name {account} that they match",
            self.policy()
        )
    }

    /// Sends the request as a dry run.
    pub(crate) async fn send(&self, cluster: &Cluster) -> kube::Result<()> {
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        match self {
            Forbidden::VolumeOfAnotherNode => {
                let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
                volumes.create(&dry_run, &volume(&cluster.identity)?).await.map(drop)
            }
            Forbidden::AnotherLease { namespace } => {
                let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
                leases.create(&dry_run, &object(json!({"metadata": {"name": NAME}}))?).await.map(drop)
            }
        }
    }
}

/// Returns a PersistentVolume that is valid, so that only admission refuses it.
fn volume(identity: &Identity) -> kube::Result<PersistentVolume> {
    object(json!({
        "metadata": {"name": NAME, "labels": {identity.node_label(): ANOTHER_NODE}},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Mi"}, "storageClassName": NAME,
            "csi": {"driver": identity.driver(), "volumeHandle": NAME},
        },
    }))
}

fn object<K: serde::de::DeserializeOwned>(fields: Value) -> kube::Result<K> {
    serde_json::from_value(fields).map_err(kube::Error::SerdeError)
}

/// Returns what a response says about a policy. An account without the right, a quota, or the policy of another owner says nothing.
pub(crate) fn enforced(response: &kube::Result<()>, policy: &str) -> Enforced {
    match response {
        Ok(()) => Some(false),
        // A prefix of kustomize may be part of the name.
        Err(kube::Error::Api(status)) => {
            let is_policy = status.message.contains("ValidatingAdmissionPolicy '");
            (is_policy && status.message.contains(&format!("{policy}' with binding"))).then_some(true)
        }
        Err(_) => None,
    }
}

/// Checks until shutdown, and sets `latest`. Records an event about the node when the policies turn out not to be enforced.
pub(crate) async fn check(cluster: &Cluster, forbidden: &Forbidden, latest: &watch::Sender<Enforced>) {
    let mut allowed = 0;
    loop {
        let response = forbidden.send(cluster).await;
        let enforced = enforced(&response, forbidden.policy());
        allowed = if enforced == Some(false) { allowed + 1 } else { 0 };
        match enforced {
            Some(true) => {
                if latest.send_replace(enforced) == Some(false) {
                    tracing::info!("the API server enforces the admission policies again");
                }
            }
            Some(false) if allowed >= ALLOWED_MAX => {
                if latest.send_replace(enforced) != enforced {
                    cluster.events.publish_on_node(Reason::PoliciesNotEnforced, forbidden.fault());
                }
            }
            Some(false) => {}
            None => {
                let error = response.as_ref().err().map(ToString::to_string);
                tracing::debug!(
                    error,
                    "could not find out whether the API server enforces the admission policies; it is checked again"
                );
            }
        }
        sleep(if enforced == Some(true) { CHECK_INTERVAL } else { RETRY_INTERVAL }).await;
    }
}

/// Registers whether the API server enforces the policies, once it is known.
pub(crate) fn register(latest: Enforced, registry: &mut Registry) {
    if let Some(enforced) = latest {
        let help = "1 if the API server refuses what the admission policies forbid to this process, else 0";
        registry.count("policies_enforced", help, u64::from(enforced));
    }
}

/// Returns the text for `/readyz` of a process that serves without the policies.
pub(crate) fn notice(latest: Enforced) -> Option<String> {
    (latest == Some(false)).then(|| {
        "the API server does not enforce the admission policies, so a stolen token of one node reaches the volumes of all nodes; the event \
         PoliciesNotEnforced of the Node has the remedy"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use http::Method;
    use rstest::rstest;

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect};

    const PATH: &str = "/api/v1/persistentvolumes";

    fn attempt() -> ExpectedRequest {
        let mut body = serde_json::to_value(volume(&fixtures::identity()).unwrap()).unwrap();
        fixtures::merge(&mut body, json!({"apiVersion": "v1", "kind": "PersistentVolume"}));
        expect(Method::POST, PATH, body).respond(json!({"metadata": {"name": NAME}}))
    }

    fn refused_by(policy: &str) -> ExpectedRequest {
        let message = format!(
            "persistentvolumes {NAME:?} is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: no"
        );
        attempt().refuse_saying(422, "Invalid", &message, Value::Null)
    }

    /// Returns what the checks have found after these responses, and the events.
    async fn checked(responses: Vec<ExpectedRequest>) -> (Enforced, Vec<&'static str>) {
        let count = u32::try_from(responses.len()).unwrap();
        let context = TestContext::new(responses);
        let latest = watch::Sender::new(None);
        let checking = check(&context.ctx.cluster, &Forbidden::VolumeOfAnotherNode, &latest);
        // The next check is due at the end of the time.
        let time = RETRY_INTERVAL * count - Duration::from_secs(1);
        assert!(tokio::time::timeout(time, checking).await.is_err());
        let found = *latest.borrow();
        (found, context.finish().await)
    }

    #[rstest]
    #[case::refused(vec![refused_by("loopfs-provisioner-volumes")], Some(true), &[])]
    #[case::refused_by_a_prefixed_policy(vec![refused_by("b-loopfs-provisioner-volumes")], Some(true), &[])]
    #[case::refused_by_another_policy(vec![refused_by("quota")], None, &[])]
    #[case::not_granted(vec![attempt().refuse(403, "Forbidden")], None, &[])]
    #[case::not_in_force_yet(vec![attempt(), attempt(), refused_by("loopfs-provisioner-volumes")], Some(true), &[])]
    #[case::allowed((0..6).map(|_| attempt()).collect(), Some(false), &["PoliciesNotEnforced"])]
    #[case::allowed_only_sometimes(
        vec![attempt(), attempt(), attempt(), attempt().refuse(500, "InternalError"), attempt()],
        None,
        &[]
    )]
    #[tokio::test(start_paused = true)]
    async fn only_policies_of_the_driver_count(
        #[case] responses: Vec<ExpectedRequest>,
        #[case] expected: Enforced,
        #[case] events: &[&str],
    ) {
        let (found, recorded) = checked(responses).await;
        assert_eq!((found, recorded.as_slice()), (expected, events));
    }

    #[test]
    fn only_a_missing_policy_is_noted() {
        assert_eq!((notice(None), notice(Some(true))), (None, None));
        assert!(notice(Some(false)).unwrap().contains("PoliciesNotEnforced"));
    }
}
