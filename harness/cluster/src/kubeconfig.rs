//! Kubeconfig files: the server's address, the authority that certifies it, and the user's credentials.

use std::net::SocketAddrV4;

use serde_json::{Value, json};

use super::pki::Identity;

/// Returns a user that authenticates with a certificate.
pub(crate) fn certified(caller: &Identity) -> Value {
    json!({
        "client-certificate-data": base64(caller.certificate.as_bytes()),
        "client-key-data": base64(caller.key.as_bytes()),
    })
}

/// Returns a kubeconfig with all certificates inline, so that the file works from any directory and in the
/// guest. It is JSON, which every reader of kubeconfigs accepts as YAML.
pub(crate) fn render(cluster: &str, server: SocketAddrV4, authority: &str, user: &Value) -> String {
    let config: Value = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": cluster, "cluster": {
            "server": format!("https://{server}"),
            "certificate-authority-data": base64(authority.as_bytes()),
        }}],
        "users": [{"name": cluster, "user": user}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": cluster}}],
        "current-context": cluster,
    });
    format!("{config:#}\n")
}

fn base64(bytes: &[u8]) -> Value {
    // k8s-openapi's ByteString serialises as the base64 the API uses.
    json!(k8s_openapi::ByteString(bytes.to_vec()))
}
