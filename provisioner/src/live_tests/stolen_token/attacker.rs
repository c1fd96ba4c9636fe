//! The attacker who controls a node, with the tokens of one account of the driver.

use std::collections::BTreeSet;

use k8s_openapi::api::authentication::v1::{SelfSubjectReview, TokenRequest};
use k8s_openapi::api::core::v1::ServiceAccount;

use super::super::*;
use super::OptionalComponent;
use super::attempt::Token;
use super::rights::{Right, granted};

/// An account of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Account {
    /// The account of the pod on each node.
    Provisioner,
    Controller,
}

impl Account {
    pub(super) const ALL: [Account; 2] = [Account::Provisioner, Account::Controller];

    pub(super) fn name(self) -> &'static str {
        match self {
            Account::Provisioner => "loopfs-provisioner",
            Account::Controller => "loopfs-controller",
        }
    }

    /// Returns the name of the account as a user of the API server.
    pub(super) fn user(self) -> String {
        format!("system:serviceaccount:{SYSTEM}:{}", self.name())
    }
}

pub(super) struct Attacker {
    pub(super) account: Account,
    component: OptionalComponent,
    pub(super) rights: BTreeSet<Right>,
    /// The pod whose token was stolen.
    pub(super) pod: OwnerReference,
    of_pod: Client,
    unbound: Client,
}

impl Attacker {
    /// Creates an attacker who has stolen the token of a pod. `of_pod` is a client with that token.
    pub(super) async fn new(
        cluster: &TestCluster,
        account: Account,
        component: OptionalComponent,
        of_pod: Client,
    ) -> Attacker {
        Attacker {
            account,
            component,
            rights: granted(&cluster.admin, account).await,
            pod: pod_of_token(&of_pod, account).await,
            of_pod,
            unbound: client_with_token(cluster, SYSTEM, account, json!({"audiences": []})).await,
        }
    }

    pub(super) fn client(&self, token: Token) -> &Client {
        match token {
            Token::OfPod => &self.of_pod,
            Token::Unbound => &self.unbound,
        }
    }

    pub(super) fn is_controller(&self) -> bool {
        self.account == Account::Controller
    }

    /// Returns `true` if the account has the roles of the provisioner.
    pub(super) fn provisions(&self) -> bool {
        !self.is_controller() || self.component == OptionalComponent::BuiltinObjects
    }

    /// Returns `true` if the account may delete claims of lost volumes.
    pub(super) fn deletes_claims(&self) -> bool {
        self.component == OptionalComponent::NodeLoss
    }

    /// Returns `true` if the account may delete objects of volumes whose node was deleted.
    pub(super) fn reconciles_deleted_nodes(&self) -> bool {
        self.is_controller() && self.component == OptionalComponent::NodeLoss
    }

    /// Returns `true` if the account may write the snapshots of its node.
    pub(super) fn takes_snapshots(&self) -> bool {
        !self.is_controller() && self.component == OptionalComponent::Snapshots
    }

    /// Returns `true` if the account may label claims with their nodes.
    pub(super) fn labels_claims(&self) -> bool {
        self.is_controller() && self.component == OptionalComponent::ClaimLabels
    }
}

/// Returns the pod that the API server finds in the token of a client.
async fn pod_of_token(client: &Client, account: Account) -> OwnerReference {
    let review: Api<SelfSubjectReview> = Api::all(client.clone());
    let review = review.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    let user = review.status.unwrap().user_info.unwrap();
    assert_eq!(user.username, Some(account.user()));
    let extra = user.extra.unwrap();
    let [name, uid] = ["pod-name", "pod-uid"].map(|key| {
        let values = &extra[&format!("authentication.kubernetes.io/{key}")];
        values[0].clone()
    });
    OwnerReference { api_version: "v1".to_owned(), kind: "Pod".to_owned(), name, uid, ..Default::default() }
}

/// Returns a client with a token that was requested for an account in a namespace, and not for a pod.
pub(super) async fn client_with_token(
    cluster: &TestCluster,
    namespace: &str,
    account: Account,
    spec: Value,
) -> Client {
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.admin.clone(), namespace);
    let request: TokenRequest = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
    let response =
        accounts.create_token_request(account.name(), &PostParams::default(), &request).await.unwrap();
    let text = std::fs::read_to_string(TestCluster::kubeconfig_of(HERE)).unwrap();
    let mut kubeconfig: Value = serde_norway::from_str(&text).unwrap();
    kubeconfig["users"][0]["user"]["token"] = json!(response.status.unwrap().token);
    let path = cluster.scratch.path().join(format!("{}-{namespace}.kubeconfig", account.name()));
    std::fs::write(&path, kubeconfig.to_string()).unwrap();
    crate::api::client::connect(Some(path), &ApiTraffic::default()).await.unwrap()
}
