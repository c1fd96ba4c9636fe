//! `dbg kubectl`.
//!
//! The kubeconfig is a file in memory (memfd_create(2)) that only kubectl inherits. It has no name, so nothing has to be
//! removed, also if dbg or kubectl is killed.
//!
//! dbg builds it from the fields of the response. An attacker who controls the node could otherwise send a kubeconfig that
//! names a program (`users[].user.exec`), and kubectl would run it on this machine.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;

use super::args::KubectlArgs;
use super::connect::Client;
use crate::proto as wire;

pub(super) async fn run(socket: &Path, args: KubectlArgs) -> anyhow::Result<ExitCode> {
    let KubectlArgs { kubectl, arguments } = args;
    let mut client = Client::connect(socket).await?;
    let response = client.service.kubeconfig(wire::KubeconfigRequest {}).await;
    let response = response.map_err(|status| client.explain(status))?.into_inner();
    let kubeconfig = in_memory(&kubeconfig(&response)?).context("hold the kubeconfig in memory")?;
    // kubectl opens it by this path, in its own process.
    let path = format!("/proc/self/fd/{}", kubeconfig.as_raw_fd());
    // kubectl replaces dbg, so signals and the exit code are those of kubectl.
    let error = Command::new(&kubectl).args(arguments).env("KUBECONFIG", path).exec();
    Err(anyhow!("run {}: {error}; install kubectl, or give its path with --kubectl", kubectl.display()))
}

/// Returns a kubeconfig as JSON, which is YAML as well. Its user has a token and nothing else.
fn kubeconfig(response: &wire::KubeconfigResponse) -> anyhow::Result<String> {
    let wire::KubeconfigResponse { server, certificate_authority, namespace, token } = response;
    ensure!(
        server.starts_with("https://") || server.starts_with("http://"),
        "node-debug sent {server:?} as the URL of the API server; see the kubeconfig of node-debug"
    );
    let mut cluster = json!({ "server": server });
    if !certificate_authority.is_empty() {
        cluster["certificate-authority-data"] = json!(STANDARD.encode(certificate_authority));
    }
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "node", "cluster": cluster }],
        "users": [{ "name": "dbg", "user": { "token": token } }],
        "contexts": [{ "name": "node", "context": { "cluster": "node", "user": "dbg", "namespace": namespace } }],
        "current-context": "node",
    });
    Ok(format!("{kubeconfig:#}\n"))
}

/// Returns a file without a name, which child processes inherit.
fn in_memory(content: &str) -> std::io::Result<File> {
    // Without MFD_CLOEXEC.
    let mut file = File::from(memfd_create(c"kubeconfig", MFdFlags::empty())?);
    file.write_all(content.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use kube::config::{Config, KubeConfigOptions, Kubeconfig};
    use serde_json::Value;

    use super::*;

    const DER: &[u8] = b"a certificate";

    fn response() -> wire::KubeconfigResponse {
        wire::KubeconfigResponse {
            server: "https://10.0.0.1:6443/".to_owned(),
            certificate_authority: format!(
                "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
                STANDARD.encode(DER)
            ),
            namespace: "shop".to_owned(),
            token: "T".to_owned(),
        }
    }

    /// It also has the server and its certificate authority.
    #[tokio::test]
    async fn kubeconfig_has_only_token_as_credential() {
        let parsed = Kubeconfig::from_yaml(&kubeconfig(&response()).unwrap()).unwrap();
        let config = Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await.unwrap();
        assert_eq!(
            (config.cluster_url.to_string().as_str(), config.default_namespace.as_str()),
            ("https://10.0.0.1:6443/", "shop")
        );
        assert_eq!(config.root_cert, Some(vec![DER.to_vec()]));
        assert!(config.auth_info.token.is_some() && config.auth_info.client_key_data.is_none());
    }

    /// Such a plugin would make kubectl run a program that the service chooses.
    #[test]
    fn response_fields_cannot_inject_exec_plugin() {
        let program = "\"}},{\"name\":\"dbg\",\"user\":{\"exec\":{\"command\":\"sh\"}}\nusers:\n- exec: sh\n";
        let response = wire::KubeconfigResponse {
            server: format!("https://x/{program}"),
            certificate_authority: program.to_owned(),
            namespace: program.to_owned(),
            token: program.to_owned(),
        };
        let parsed: Value = serde_json::from_str(&kubeconfig(&response).unwrap()).unwrap();
        assert_eq!(parsed["users"], json!([{ "name": "dbg", "user": { "token": program } }]));
        let keys: Vec<&String> = parsed["clusters"][0]["cluster"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["certificate-authority-data", "server"]);
    }

    #[test]
    fn invalid_server_url_is_refused() {
        let response = wire::KubeconfigResponse { server: "/etc/passwd".to_owned(), ..response() };
        let error = kubeconfig(&response).unwrap_err().to_string();
        assert!(error.contains("as the URL of the API server"), "{error}");
    }
}
