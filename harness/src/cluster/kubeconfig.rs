//! Kubeconfig files: where the API server is, how to know it, and who is calling.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::pki::Identity;

/// A kubeconfig with everything inline, so that the file works from any directory and in the guest.
/// It is JSON, which every reader of kubeconfigs takes, since it is YAML too.
pub(crate) fn render(cluster: &str, server: SocketAddr, authority: &str, caller: &Identity) -> String {
    let config: Value = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": cluster, "cluster": {
            "server": format!("https://{server}"),
            "certificate-authority-data": base64(authority.as_bytes()),
        }}],
        "users": [{"name": cluster, "user": {
            "client-certificate-data": base64(caller.certificate.as_bytes()),
            "client-key-data": base64(caller.key.as_bytes()),
        }}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": cluster}}],
        "current-context": cluster,
    });
    format!("{config:#}\n")
}

fn base64(bytes: &[u8]) -> Value {
    // k8s-openapi's ByteString serialises as the base64 the API uses.
    json!(k8s_openapi::ByteString(bytes.to_vec()))
}
