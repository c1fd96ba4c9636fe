//! The listeners: a unix socket, and TCP with mutual TLS.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use csi::connection_limit;
use csi::socket::SocketFile;
use nix::unistd::{Uid, geteuid};
use service::Tasks;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::task::JoinSet;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::UdsConnectInfo;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Status};

use crate::args::Args;
use crate::cluster::ApiServerAccess;
use crate::conditions::ConditionSubject;
use crate::logs::{self, Logs};
use crate::protected;
use crate::proto::node_debug_server::NodeDebugServer;
use crate::service::NodeDebugService;

/// Calls on one connection.
const MAX_STREAMS: u32 = 32;

/// Requests are small.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The longest time for the TLS handshake. A client without a certificate can keep a connection no longer.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval at which the service checks that a client still exists, and the time that the client has to respond.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest time that open calls may take after the shutdown was requested.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the service until `stop`.
///
/// # Errors
/// A listener could not be opened.
pub async fn serve(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    RunningService::start(args, stop).await?.finished().await
}

/// The service, listening.
#[derive(Debug)]
pub struct RunningService {
    /// The TCP address on which it listens.
    pub address: Option<SocketAddr>,
    servers: Tasks,
    _following: JoinSet<()>,
}

impl RunningService {
    /// Opens the listeners and reads the logs until `stop`, or until the value is dropped.
    ///
    /// # Errors
    /// A listener could not be opened, or its certificates could not be used.
    pub async fn start(args: Args, stop: CancellationToken) -> anyhow::Result<Self> {
        let Args {
            socket,
            listen,
            tls_cert,
            tls_key,
            client_ca,
            logs,
            log_bytes,
            driver_name,
            registration_dir,
            data_dir,
            node_name,
            kubeconfig,
            service_accounts,
            kubeconfig_max_lifetime,
            log: _,
        } = args;
        if let Some(name) = duplicate(logs.iter().map(|log| log.name.as_str())) {
            return Err(anyhow!("component {name} is given twice (--log)"));
        }
        let paths = logs.iter().filter_map(|log| log.source.path());
        if let Some(path) = duplicate(paths.chain([socket.as_path()])) {
            return Err(anyhow!(
                "{} is given twice; give each component a path of its own (--log, --socket)",
                path.display()
            ));
        }
        let cluster = kubeconfig.map(ApiServerAccess::new);
        let subject = ConditionSubject { driver_name, registration_dir, data_dir, node_name, cluster };
        let lifetime = Duration::from_secs(kubeconfig_max_lifetime.into());
        let service = NodeDebugService::new(
            Logs::new(logs, log_bytes as usize),
            subject,
            service_accounts,
            lifetime,
            stop.clone(),
        );

        // TLS comes first: nothing listens if the certificates cannot be used.
        let tcp = match (listen, tls_cert, tls_key, client_ca) {
            (None, ..) => None,
            (Some(address), Some(certificate), Some(key), Some(authority)) => {
                let tls = tls_config(&certificate, &key, &authority)?;
                let listener = TcpListener::bind(address).await;
                Some((listener.with_context(|| format!("listen on {address} (--listen)"))?, tls))
            }
            (Some(address), ..) => {
                return Err(anyhow!(
                    "listen on {address}: give --tls-cert, --tls-key and --client-ca as well"
                ));
            }
        };
        let address = tcp.as_ref().map(|(listener, _)| listener.local_addr()).transpose()?;

        let mut servers = Tasks::new(stop.clone());
        let (listener, socket_file) = listen_unix(&socket).await?;
        let unix = builder().add_service(InterceptedService::new(server(&service), admit_peer));
        let incoming = connection_limit::limited(UnixListenerStream::new(listener), |_| ());
        let stopped = stop.clone().cancelled_owned();
        servers.try_spawn("unix socket", async move {
            let _removed_on_drop = socket_file;
            unix.serve_with_incoming_shutdown(incoming, stopped).await.context("serve the unix socket")
        });
        if let Some((listener, tls)) = tcp {
            let tcp =
                builder().tls_config(tls).context("use the certificates")?.add_service(server(&service));
            let incoming = connection_limit::limited(TcpListenerStream::new(listener), address_of);
            let stopped = stop.cancelled_owned();
            servers.try_spawn("TCP", async move {
                tcp.serve_with_incoming_shutdown(incoming, stopped).await.context("serve TCP")
            });
        }
        tracing::info!(socket = %socket.display(), ?address, version = env!("CARGO_PKG_VERSION"), "serving");
        Ok(Self { address, servers, _following: service.logs.follow() })
    }

    /// Waits until the service has ended.
    ///
    /// # Errors
    /// A listener failed.
    pub async fn finished(self) -> anyhow::Result<()> {
        self.servers.finish(SHUTDOWN_TIMEOUT).await
    }
}

/// Returns an item that occurs more than once.
fn duplicate<T: Ord + Copy>(items: impl Iterator<Item = T>) -> Option<T> {
    let mut items: Vec<T> = items.collect();
    items.sort_unstable();
    items.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// Returns the address of a client. One that has closed its connection has none.
fn address_of(stream: &TcpStream) -> Option<IpAddr> {
    stream.peer_addr().ok().map(|address| address.ip().to_canonical())
}

fn builder() -> Server {
    Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
}

fn server(service: &NodeDebugService) -> NodeDebugServer<NodeDebugService> {
    NodeDebugServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST_BYTES)
}

fn tls_config(certificate: &Path, key: &Path, authority: &Path) -> anyhow::Result<ServerTlsConfig> {
    let read = |path: &PathBuf, flag: &str| {
        fs::read(path).with_context(|| format!("read {} ({flag})", path.display()))
    };
    let identity =
        Identity::from_pem(read(&certificate.to_owned(), "--tls-cert")?, read(&key.to_owned(), "--tls-key")?);
    let authority_pem = read(&authority.to_owned(), "--client-ca")?;
    // An empty list of authorities must not be taken for no requirement.
    ensure!(
        String::from_utf8_lossy(&authority_pem).contains("-----BEGIN CERTIFICATE-----"),
        "read {} (--client-ca): it has no PEM certificate",
        authority.display()
    );
    Ok(ServerTlsConfig::new()
        .identity(identity)
        .client_ca_root(Certificate::from_pem(authority_pem))
        .client_auth_optional(false)
        .timeout(HANDSHAKE_TIMEOUT))
}

/// Listens on a unix socket in a directory in which no other user can replace it.
async fn listen_unix(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    let listening = async { logs::listen(&protected::path(path, 0o700)?).await };
    listening.await.context("open the socket of the service (--socket)")
}

/// Admits root and the user of the service.
fn admit_peer(request: Request<()>) -> Result<Request<()>, Status> {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    match peer {
        Some(peer) if is_admitted(Uid::from_raw(peer.uid()), geteuid()) => Ok(request),
        Some(peer) => Err(Status::permission_denied(format!(
            "user {} may not use this socket; use root or the user of node-debug",
            peer.uid()
        ))),
        None => Err(Status::permission_denied("the kernel does not know the user of this connection")),
    }
}

fn is_admitted(peer: Uid, this_user: Uid) -> bool {
    peer.is_root() || peer == this_user
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Root and the user of the service are admitted.
    #[rstest]
    #[case::root(0, true)]
    #[case::same_user(7, true)]
    #[case::other_user(8, false)]
    fn other_users_are_not_admitted(#[case] peer: u32, #[case] is_ok: bool) {
        assert_eq!(is_admitted(Uid::from_raw(peer), Uid::from_raw(7)), is_ok);
    }
}
