//! A proxy on the loopback that counts what a client receives from a server. It does not decrypt the connections.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// The poll interval of [`CountingProxy::until_quiet`].
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The largest part of a response that the proxy holds.
const BUFFER_BYTES: usize = 64 * 1024;

/// The position of the server in a kubeconfig.
const SERVER: &str = "/clusters/0/cluster/server";

/// A running proxy. Dropping it closes its connections.
#[derive(Debug)]
pub(super) struct CountingProxy {
    address: SocketAddr,
    received: Arc<AtomicU64>,
    serving: JoinHandle<()>,
}

impl CountingProxy {
    /// Starts a proxy of `server` on a free port.
    async fn start(server: SocketAddr) -> Result<CountingProxy> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("bind a port of the loopback")?;
        let address = listener.local_addr().context("read the address of the proxy")?;
        let received = Arc::new(AtomicU64::new(0));
        let serving = tokio::spawn(serve(listener, server, Arc::clone(&received)));
        Ok(CountingProxy { address, received, serving })
    }

    /// Starts a proxy of the API server that this kubeconfig names.
    pub(super) async fn of_kubeconfig(kubeconfig: &str) -> Result<CountingProxy> {
        let kubeconfig: Value = serde_json::from_str(kubeconfig).context("parse the kubeconfig")?;
        let server = kubeconfig.pointer(SERVER).and_then(Value::as_str);
        let server = server.and_then(|url| url.strip_prefix("https://"));
        let server = server.context("the kubeconfig names no server")?;
        CountingProxy::start(server.parse().with_context(|| format!("parse the address {server}"))?).await
    }

    /// Replaces the server of a kubeconfig by the proxy. The certificate of the API server covers its IP address with any port.
    pub(super) fn redirect(&self, kubeconfig: &str) -> Result<String> {
        let mut kubeconfig: Value = serde_json::from_str(kubeconfig).context("parse the kubeconfig")?;
        let server = kubeconfig.pointer_mut(SERVER).context("the kubeconfig names no server")?;
        *server = format!("https://{}", self.address).into();
        Ok(kubeconfig.to_string())
    }

    /// Returns the number of bytes that the client has received from the server.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Waits until the client has received nothing for `quiet`, and returns what it has received in all.
    pub(super) async fn until_quiet(&self, quiet: Duration, timeout: Duration) -> Result<u64> {
        let started = Instant::now();
        let (mut last, mut since) = (self.received(), started);
        while since.elapsed() < quiet {
            anyhow::ensure!(
                started.elapsed() < timeout,
                "the process still receives bytes from the API server after {timeout:?}, {last} up to now"
            );
            tokio::time::sleep(POLL_INTERVAL).await;
            let received = self.received();
            if received != last {
                (last, since) = (received, Instant::now());
            }
        }
        Ok(last)
    }
}

impl Drop for CountingProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Serves until it is dropped, which closes the connections.
async fn serve(listener: TcpListener, server: SocketAddr, received: Arc<AtomicU64>) {
    let mut connections = JoinSet::new();
    loop {
        // An error concerns one connection. The client sees it, and connects again.
        let Ok((client, _)) = listener.accept().await else { continue };
        let received = Arc::clone(&received);
        connections.spawn(async move { drop(relay(client, server, &received).await) });
        while connections.try_join_next().is_some() {}
    }
}

async fn relay(mut client: TcpStream, server: SocketAddr, received: &AtomicU64) -> std::io::Result<()> {
    let mut server = TcpStream::connect(server).await?;
    // Both ends send small messages without delay, and the proxy does not delay them either.
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let sending = async {
        tokio::io::copy(&mut from_client, &mut to_server).await?;
        to_server.shutdown().await
    };
    let receiving = async {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let length = from_server.read(&mut buffer).await?;
            if length == 0 {
                return to_client.shutdown().await;
            }
            to_client.write_all(&buffer[..length]).await?;
            received.fetch_add(length as u64, Ordering::Relaxed);
        }
    };
    tokio::try_join!(sending, receiving).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Serves one connection: reads four bytes and responds with ten.
    async fn respond(listener: TcpListener) {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut request = [0; 4];
        connection.read_exact(&mut request).await.unwrap();
        assert_eq!(&request, b"ping");
        connection.write_all(b"0123456789").await.unwrap();
    }

    #[tokio::test]
    async fn a_redirected_kubeconfig_names_the_proxy() {
        let kubeconfig = r#"{"clusters":[{"cluster":{"server":"https://127.0.0.1:9"}}],"user":"node-1"}"#;
        let proxy = CountingProxy::of_kubeconfig(kubeconfig).await.unwrap();
        let redirected = kubeconfig.replace("127.0.0.1:9", &proxy.address.to_string());
        assert_eq!(proxy.redirect(kubeconfig).unwrap(), redirected);
        assert!(CountingProxy::of_kubeconfig("{}").await.is_err() && proxy.redirect("{}").is_err());
    }

    #[tokio::test]
    async fn only_server_bytes_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = CountingProxy::start(listener.local_addr().unwrap()).await.unwrap();
        let request = async {
            let mut client = TcpStream::connect(proxy.address).await.unwrap();
            client.write_all(b"ping").await.unwrap();
            let mut response = String::new();
            client.read_to_string(&mut response).await.unwrap();
            response
        };
        let ((), response) = tokio::join!(respond(listener), request);
        assert_eq!(response, "0123456789");
        assert_eq!(proxy.until_quiet(2 * POLL_INTERVAL, TIMEOUT).await.unwrap(), 10);
    }

    #[tokio::test]
    async fn constantly_receiving_client_is_never_quiet() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = CountingProxy::start(listener.local_addr().unwrap()).await.unwrap();
        let received = Arc::clone(&proxy.received);
        let receiving = tokio::spawn(async move {
            loop {
                received.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(POLL_INTERVAL / 10).await;
            }
        });
        let error = proxy.until_quiet(TIMEOUT, 3 * POLL_INTERVAL).await.unwrap_err().to_string();
        receiving.abort();
        assert!(error.contains("still receives"), "{error}");
    }
}
