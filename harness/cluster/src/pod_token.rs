//! Service account tokens as pods find them mounted: bound to the pod and its node.

use std::path::PathBuf;

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::api_error::api_error;
use super::control_plane::ControlPlane;
use super::files::{create_private_dir, write_private};

/// The lifetime of a token, longer than any run.
const LIFETIME_SECONDS: i64 = 4 * 3600;

impl ControlPlane {
    /// Writes a kubeconfig called `name` for a program in a pod, with the rights of the pod's account.
    pub async fn kubeconfig_of_pod(&self, pod: &Pod, name: &str) -> Result<PathBuf> {
        let namespace = pod.namespace().context("a pod without a namespace")?;
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        let account = account.context("a pod without a service account")?;
        let request: TokenRequest = serde_json::from_value(json!({
            "metadata": {},
            "spec": {
                "audiences": [],
                "expirationSeconds": LIFETIME_SECONDS,
                "boundObjectRef": {
                    "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.metadata.uid,
                },
            },
        }))?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().clone(), &namespace);
        let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
        let answer =
            answer.map_err(api_error).with_context(|| format!("ask for a token of {namespace}/{account}"))?;
        let token =
            answer.status.and_then(|status| status.token).context("the API server answered no token")?;
        let directory = self.layout().root.join("pods");
        create_private_dir(&directory)?;
        let path = directory.join(format!("{name}.kubeconfig"));
        write_private(&path, &self.kubeconfig_of_user(&json!({"token": token})))?;
        Ok(path)
    }
}
