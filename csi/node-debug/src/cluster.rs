//! The API server: the objects of this node, and tokens for kubeconfigs.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, Config};

/// The longest time for one request to the API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The wait after a failed attempt to connect.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The shortest lifetime of a token that the API server issues.
pub(crate) const MIN_LIFETIME: Duration = Duration::from_secs(600);

/// A service account for which clients may request a kubeconfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedAccount {
    /// The name by which clients request it.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name in the namespace.
    pub account: String,
}

impl FromStr for AllowedAccount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (name, object) = text.split_once('=')?;
            let (namespace, account) = object.split_once('/')?;
            [name, namespace, account].iter().all(|part| is_object_name(part)).then(|| Self {
                name: name.to_owned(),
                namespace: namespace.to_owned(),
                account: account.to_owned(),
            })
        };
        parse().ok_or_else(|| {
            "must be NAME=NAMESPACE/ACCOUNT, such as viewer=kube-system/node-debug-viewer".to_owned()
        })
    }
}

fn is_object_name(text: &str) -> bool {
    let is_alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.starts_with(is_alphanumeric)
        && text.ends_with(is_alphanumeric)
        && text.chars().all(|c| is_alphanumeric(c) || "-.".contains(c))
}

/// The service's access to the API server.
#[derive(Clone, Debug)]
pub(crate) struct ApiServerAccess {
    kubeconfig: PathBuf,
}

/// An object of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeObject {
    Node,
    CsiNode,
}

/// What a client needs for a kubeconfig. Without Debug, logging the token by accident does not compile.
pub(crate) struct IssuedToken {
    /// URL of the API server.
    pub(crate) server: String,
    /// Its certificate authority, as PEM.
    pub(crate) authority: Option<String>,
    pub(crate) token: String,
    /// When its token expires, in RFC 3339.
    pub(crate) expires: String,
}

impl ApiServerAccess {
    pub(crate) fn new(kubeconfig: PathBuf) -> Self {
        Self { kubeconfig }
    }

    /// Reads the kubeconfig each time: on a node that is starting, it may be written later than the service starts.
    async fn config(&self) -> anyhow::Result<Config> {
        let read = async || {
            let kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
        };
        read().await.with_context(|| format!("use kubeconfig {} (--kubeconfig)", self.kubeconfig.display()))
    }

    async fn client(&self) -> anyhow::Result<Client> {
        Client::try_from(self.config().await?).context("set up the connection to the API server")
    }

    /// Returns the Node object, or `None` if it does not exist.
    pub(crate) async fn node(&self, name: &str) -> anyhow::Result<Option<Node>> {
        let get = async { Ok(Api::all(self.client().await?).get_opt(name).await?) };
        in_time(get).await.with_context(|| format!("get Node {name}"))
    }

    /// Returns the CSINode object, or `None` if it does not exist.
    pub(crate) async fn csi_node(&self, name: &str) -> anyhow::Result<Option<CSINode>> {
        let get = async { Ok(Api::all(self.client().await?).get_opt(name).await?) };
        in_time(get).await.with_context(|| format!("get CSINode {name}"))
    }

    /// Notifies of changes of an object. It also notifies when a connection was lost, since changes may have been missed.
    pub(crate) fn changes(&self, object: NodeObject, name: &str) -> BoxStream<'static, ()> {
        let attempts = stream::repeat((self.clone(), name.to_owned()));
        let watches = attempts.then(move |(cluster, name)| async move {
            match cluster.client().await {
                Ok(client) if object == NodeObject::Node => {
                    watch_object::<Node>(Api::all(client), &name).default_backoff().map(drop).boxed()
                }
                Ok(client) => {
                    watch_object::<CSINode>(Api::all(client), &name).default_backoff().map(drop).boxed()
                }
                Err(_) => {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    stream::once(async {}).boxed()
                }
            }
        });
        watches.flatten().boxed()
    }

    /// Requests a token for the account, and returns it with the address of the API server.
    pub(crate) async fn issue(
        &self,
        account: &AllowedAccount,
        lifetime: Duration,
    ) -> anyhow::Result<IssuedToken> {
        let AllowedAccount { namespace, account: name, .. } = account;
        let issue = async {
            let config = self.config().await?;
            let (server, authority) = (config.cluster_url.to_string(), config.root_cert.clone());
            let client = Client::try_from(config)?;
            let spec = TokenRequestSpec {
                expiration_seconds: Some(i64::try_from(lifetime.as_secs())?),
                ..TokenRequestSpec::default()
            };
            let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
            let accounts: Api<ServiceAccount> = Api::namespaced(client, namespace);
            let issued = accounts.create_token_request(name, &PostParams::default(), &request).await?;
            let status = issued.status.context("the response has no status")?;
            let token = status.token.context("the response has no token")?;
            let expires = status.expiration_timestamp.context("the response has no time of expiry")?;
            let authority = authority.map(|certificates| pem(&certificates));
            anyhow::Ok(IssuedToken { server, authority, token, expires: expires.0.to_string() })
        };
        in_time(issue)
            .await
            .with_context(|| format!("request a token for service account {namespace}/{name}"))
    }
}

async fn in_time<T>(request: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(REQUEST_TIMEOUT, request)
        .await
        .unwrap_or_else(|_| Err(anyhow::anyhow!("the API server did not respond within {REQUEST_TIMEOUT:?}")))
}

/// Converts DER certificates to PEM.
fn pem(certificates: &[Vec<u8>]) -> String {
    use std::fmt::Write;

    use base64::Engine;
    let mut text = String::new();
    for certificate in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        let encoded = base64::engine::general_purpose::STANDARD.encode(certificate);
        for line in encoded.as_bytes().chunks(64) {
            // Writing to a String cannot fail, and base64 is ASCII.
            writeln!(text, "{}", String::from_utf8_lossy(line)).ok();
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::account("viewer=kube-system/node-debug-viewer", Some(("viewer", "kube-system", "node-debug-viewer")))]
    #[case::no_name("kube-system/viewer", None)]
    #[case::no_namespace("viewer=viewer", None)]
    #[case::path("viewer=../a/b", None)]
    #[case::query("viewer=a/b?x", None)]
    #[case::empty("viewer=a/", None)]
    fn account_needs_name_and_namespace(#[case] text: &str, #[case] parts: Option<(&str, &str, &str)>) {
        let expected = parts.map(|(name, namespace, account)| AllowedAccount {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            account: account.to_owned(),
        });
        assert_eq!(text.parse().ok(), expected);
    }

    #[test]
    fn certificate_is_wrapped_at_64_characters() {
        let der = b"a certificate that is longer than one line of PEM, which has 64 characters".to_vec();
        let text = pem(std::slice::from_ref(&der));
        assert!(text.lines().all(|line| line.len() <= 64), "{text}");
        let encoded: String = text.lines().filter(|line| !line.starts_with('-')).collect();
        let decoded = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, encoded);
        assert_eq!(decoded.unwrap(), der);
    }
}
