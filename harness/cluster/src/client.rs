//! Clients of API servers and kubelets. Those on the loopback are reached without a proxy.

use std::net::IpAddr;

use anyhow::{Context, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Returns the settings of a client for the current context of a kubeconfig.
///
/// # Errors
/// The kubeconfig has no such context, or its credentials cannot be read.
pub(crate) async fn config(kubeconfig: Kubeconfig) -> Result<Config> {
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    // kube takes HTTPS_PROXY of the environment for every server. Clients in Go never use it for the loopback.
    if config.cluster_url.host().is_some_and(is_loopback) {
        config.proxy_url = None;
    }
    Ok(config)
}

/// Returns a client for the current context of a kubeconfig.
///
/// # Errors
/// As [`config`], or the credentials do not fit.
pub async fn connect(kubeconfig: Kubeconfig) -> Result<Client> {
    let config = config(kubeconfig).await?;
    let server = config.cluster_url.clone();
    Client::try_from(config).with_context(|| format!("create a client of {server}"))
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use testvm::process::Program;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn loopback_server_is_reached_without_proxy() {
        // The environment of this process cannot be changed safely, so the check runs in a child with this variable.
        Program::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "client::tests::with_a_proxy"])
            .env("HTTPS_PROXY", "http://proxy.invalid:3128")
            .run()
            .await
            .unwrap();
    }

    #[tokio::test]
    #[ignore = "the test loopback_server_is_reached_without_proxy runs it with a proxy"]
    async fn with_a_proxy() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            let response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            stream.write_all(response.as_bytes()).await.unwrap();
        };
        let request = async {
            let request = http::Request::get("/readyz").body(Vec::new()).unwrap();
            connect(kubeconfig(&server)).await.unwrap().request_text(request).await.unwrap()
        };
        assert_eq!(tokio::join!(serve, request).1, "ok");
        let elsewhere = config(kubeconfig("https://cluster.invalid")).await.unwrap();
        assert_eq!(elsewhere.proxy_url.unwrap().host(), Some("proxy.invalid"));
    }

    fn kubeconfig(server: &str) -> Kubeconfig {
        let cluster = serde_json::json!({
            "clusters": [{"name": "x", "cluster": {"server": server}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": ""}}],
            "current-context": "x",
        });
        Kubeconfig::from_yaml(&cluster.to_string()).unwrap()
    }

    #[test]
    fn loopback_addresses_and_name_are_recognised() {
        for (host, expected) in [
            ("127.0.0.1", true),
            ("127.88.0.10", true),
            ("[::1]", true),
            ("localhost", true),
            ("10.0.2.2", false),
            ("x.example", false),
        ] {
            assert_eq!(is_loopback(host), expected, "{host}");
        }
    }
}
