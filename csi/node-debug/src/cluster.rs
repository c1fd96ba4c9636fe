//! The API server: the objects of this node, and tokens for kubeconfigs.

use std::fmt::Debug;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource};
use pem::{EncodeConfig, LineEnding, Pem};
use tokio::sync::Mutex;

use crate::proto::KubeconfigResponse;

/// The longest time for one request to the API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The lifetime of a token: the shortest that the API server issues.
const LIFETIME_SECONDS: i64 = 600;

/// The service account for which clients may request a kubeconfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedAccount {
    /// Its namespace.
    pub namespace: String,
    /// Its name in the namespace.
    pub account: String,
}

impl FromStr for AllowedAccount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text
            .split_once('/')
            .filter(|(namespace, account)| is_object_name(namespace) && is_object_name(account));
        let (namespace, account) =
            parts.ok_or("must be NAMESPACE/ACCOUNT, such as kube-system/node-debug-viewer")?;
        Ok(Self { namespace: namespace.to_owned(), account: account.to_owned() })
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

impl ApiServerAccess {
    pub(crate) fn new(kubeconfig: PathBuf) -> Self {
        Self { kubeconfig }
    }

    /// Reads the kubeconfig for each call: on a node that is starting, it may be written later than the service starts.
    async fn config(&self) -> anyhow::Result<Config> {
        let read = async || {
            let kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
        };
        read().await.with_context(|| format!("use kubeconfig {} (--kubeconfig)", self.kubeconfig.display()))
    }

    /// Returns an object of the cluster, or `None` if it does not exist. The client is kept until a call fails: the kubeconfig may have
    /// been replaced.
    pub(crate) async fn object<K>(
        &self,
        kept: &Mutex<Option<Client>>,
        name: &str,
    ) -> anyhow::Result<Option<K>>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let get = async {
            let mut kept = kept.lock().await;
            // A call that fails or is cancelled leaves none.
            let client = match kept.take() {
                Some(client) => client,
                None => Client::try_from(self.config().await?)?,
            };
            let object = Api::<K>::all(client.clone()).get_opt(name).await?;
            *kept = Some(client);
            anyhow::Ok(object)
        };
        in_time(get).await.with_context(|| format!("get {} {name}", K::kind(&())))
    }

    /// Requests a token for the account, and returns it with the address of the API server, and when it expires.
    pub(crate) async fn issue(
        &self,
        account: &AllowedAccount,
    ) -> anyhow::Result<(KubeconfigResponse, Timestamp)> {
        let AllowedAccount { namespace, account } = account;
        let issue = async {
            let config = self.config().await?;
            let server = config.cluster_url.to_string();
            let certificate_authority = config.root_cert.iter().flatten().map(|der| to_pem(der)).collect();
            let spec = TokenRequestSpec { expiration_seconds: Some(LIFETIME_SECONDS), ..Default::default() };
            let request = TokenRequest { spec: Some(spec), ..Default::default() };
            let accounts: Api<ServiceAccount> = Api::namespaced(Client::try_from(config)?, namespace);
            let issued = accounts.create_token_request(account, &PostParams::default(), &request).await?;
            let status = issued.status.context("the response has no status")?;
            let token = status.token.context("the response has no token")?;
            let Time(expiry) =
                status.expiration_timestamp.context("the response does not say when the token expires")?;
            let namespace = namespace.clone();
            anyhow::Ok((KubeconfigResponse { server, certificate_authority, namespace, token }, expiry))
        };
        in_time(issue)
            .await
            .with_context(|| format!("request a token for service account {namespace}/{account}"))
    }
}

async fn in_time<T>(request: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(REQUEST_TIMEOUT, request)
        .await
        .unwrap_or_else(|_| Err(anyhow!("the API server did not respond within {REQUEST_TIMEOUT:?}")))
}

fn to_pem(der: &[u8]) -> String {
    pem::encode_config(&Pem::new("CERTIFICATE", der), EncodeConfig::new().set_line_ending(LineEnding::LF))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::account("kube-system/node-debug-viewer", Some(("kube-system", "node-debug-viewer")))]
    #[case::no_namespace("viewer", None)]
    #[case::path("../a/b", None)]
    #[case::query("a/b?x", None)]
    #[case::empty("a/", None)]
    fn account_needs_name_and_namespace(#[case] text: &str, #[case] parts: Option<(&str, &str)>) {
        let expected = parts.map(|(namespace, account)| AllowedAccount {
            namespace: namespace.to_owned(),
            account: account.to_owned(),
        });
        assert_eq!(text.parse().ok(), expected);
    }
}
