//! Kubeconfig files: the server's address, the authority that certifies it, and the user's credentials.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::pki::Identity;

/// Returns a kubeconfig with all certificates inline, so that the file works from any directory and in the
/// guest. It is JSON, which every reader of kubeconfigs accepts as YAML.
pub(crate) fn render(cluster: &str, server: SocketAddr, authority: &str, caller: &Identity) -> String {
    let user = json!({
        "client-certificate-data": base64(caller.certificate.as_bytes()),
        "client-key-data": base64(caller.key.as_bytes()),
    });
    render_user(cluster, server, authority, &user)
}

/// Returns a kubeconfig user that authenticates with a token.
pub(crate) fn token(token: &str) -> Value {
    json!({ "token": token })
}

/// Returns a kubeconfig like [`render`], for any form of user.
pub(crate) fn render_user(cluster: &str, server: SocketAddr, authority: &str, user: &Value) -> String {
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

#[cfg(test)]
mod tests {
    use kube::config::Kubeconfig;

    use super::super::pki::{Authority, Subject};
    use super::*;

    #[test]
    fn a_kubeconfig_has_server_authority_and_credentials() {
        let authority = Authority::generate("test").unwrap();
        let caller = authority.client(Subject { user: "alice", group: Some("some") }).unwrap();
        let text = render("name", "127.0.0.1:6443".parse().unwrap(), &authority.certificate(), &caller);
        let config = Kubeconfig::from_yaml(&text).unwrap();
        let cluster = config.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.server.as_deref(), Some("https://127.0.0.1:6443"));
        assert!(
            cluster
                .certificate_authority_data
                .as_ref()
                .unwrap()
                .starts_with("LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0")
        );
        assert_eq!(config.current_context.as_deref(), Some(config.contexts[0].name.as_str()));
        assert!(config.auth_infos[0].auth_info.as_ref().unwrap().client_key_data.is_some());
        let text = render_user("name", "127.0.0.1:6443".parse().unwrap(), "", &token("t"));
        let config = Kubeconfig::from_yaml(&text).unwrap();
        assert!(config.auth_infos[0].auth_info.as_ref().unwrap().token.is_some());
    }
}
