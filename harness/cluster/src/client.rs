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
    remove_needless_proxy(&mut config);
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

/// kube takes HTTPS_PROXY of the environment for every server. Clients in Go never use it for the loopback.
fn remove_needless_proxy(config: &mut Config) {
    let host = config.cluster_url.host().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    if host == "localhost" || address.is_ok_and(|address| address.is_loopback()) {
        config.proxy_url = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_server_is_reached_without_proxy() {
        for (server, has_proxy) in [
            ("https://127.0.0.1:21000", false),
            ("https://127.88.0.10:10250", false),
            ("https://[::1]:6443", false),
            ("https://localhost:6443", false),
            ("https://10.0.2.2:6443", true),
            ("https://x.example", true),
        ] {
            let mut config = Config::new(server.parse().unwrap());
            config.proxy_url = Some("http://proxy.invalid:3128".parse().unwrap());
            remove_needless_proxy(&mut config);
            assert_eq!(config.proxy_url.is_some(), has_proxy, "{server}");
        }
    }
}
