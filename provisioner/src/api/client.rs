//! The client of the API server.

use std::path::PathBuf;

use anyhow::Context as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::api::connection::{self, Timeouts};
use crate::api::traffic::ApiTraffic;

pub(crate) async fn connect(kubeconfig: Option<PathBuf>, traffic: &ApiTraffic) -> anyhow::Result<Client> {
    let client = connection::client(config(kubeconfig).await?, Timeouts::default(), traffic);
    client.context("set up the connection to the API server")
}

pub(crate) async fn config(kubeconfig: Option<PathBuf>) -> anyhow::Result<Config> {
    match kubeconfig {
        Some(path) => {
            let read = || async {
                let kubeconfig = Kubeconfig::read_from(&path)?;
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
            };
            read().await.with_context(|| format!("use kubeconfig {}", path.display()))
        }
        None => Config::incluster().context("use the pod's service account (or give --kubeconfig)"),
    }
}
