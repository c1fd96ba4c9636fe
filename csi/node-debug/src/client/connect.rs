//! The connection to the service, and the explanation of its failures.

use std::error::Error;
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, anyhow};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};

use super::args::ConnectionArgs;
use crate::proto::node_debug_client::NodeDebugClient;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval at which a client that follows a log checks that the service still exists.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// The connected service.
pub(super) struct Client {
    pub(super) service: NodeDebugClient<Channel>,
    address: String,
}

impl Client {
    pub(super) async fn connect(connection: &ConnectionArgs) -> anyhow::Result<Self> {
        let address = connection.address.clone();
        let endpoint = endpoint(connection)?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL);
        let channel = endpoint.connect().await.map_err(|error| {
            anyhow!(
                "connect to node-debug at {address}: {}; {}",
                root_cause(&error),
                remedy(&error, is_tls(&address))
            )
        })?;
        Ok(Self { service: NodeDebugClient::new(channel), address })
    }

    /// Explains a failed call in one line.
    pub(super) fn explain(&self, status: Status) -> anyhow::Error {
        match status.source() {
            // The transport failed, not the service.
            Some(source) => {
                anyhow!(
                    "call node-debug at {}: {}; {}",
                    self.address,
                    root_cause(source),
                    remedy(source, is_tls(&self.address))
                )
            }
            // The status has no message.
            None if status.code() == Code::Unimplemented => {
                anyhow!(
                    "call node-debug at {}: another program listens there, or another version of node-debug; check --address",
                    self.address
                )
            }
            None if status.code() == Code::Unknown || status.code() == Code::Internal => {
                anyhow!(
                    "call node-debug at {}: {}; see the log of node-debug",
                    self.address,
                    status.message()
                )
            }
            None => anyhow!("{}", status.message()),
        }
    }
}

fn is_tls(address: &str) -> bool {
    address.starts_with("https://")
}

fn endpoint(connection: &ConnectionArgs) -> anyhow::Result<Endpoint> {
    let ConnectionArgs { address, tls_cert, tls_key, server_ca } = connection;
    let endpoint =
        || Endpoint::from_shared(address.clone()).with_context(|| format!("use address {address:?}"));
    if address.starts_with("unix:///") {
        return endpoint();
    }
    if !is_tls(address) {
        return Err(anyhow!("address {address:?} (--address) must be unix:///PATH or https://HOST:PORT"));
    }
    let (Some(certificate), Some(key), Some(authority)) = (tls_cert, tls_key, server_ca) else {
        return Err(anyhow!("address {address} needs --tls-cert, --tls-key and --server-ca"));
    };
    let identity = Identity::from_pem(read(certificate, "--tls-cert")?, read(key, "--tls-key")?);
    let authority = Certificate::from_pem(read(authority, "--server-ca")?);
    let tls = ClientTlsConfig::new().identity(identity).ca_certificate(authority);
    endpoint()?.tls_config(tls).context("use the certificates (--tls-cert, --tls-key, --server-ca)")
}

fn read(path: &Path, flag: &str) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {} ({flag})", path.display()))
}

/// Returns the innermost cause: the outer ones only say "transport error".
fn root_cause(error: &(dyn Error + 'static)) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

/// Returns the error and its causes, the innermost last.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> Vec<&'a (dyn Error + 'static)> {
    let mut causes = vec![error];
    let mut next = error.source();
    while let Some(cause) = next {
        causes.push(cause);
        next = cause.source();
    }
    causes
}

/// The remedy if the service may have refused the certificate, or the client that of the service.
const CERTIFICATES: &str = "--tls-cert must be from the authority that node-debug has as --client-ca, and the certificate of \
                            node-debug from --server-ca";

/// Returns what to do about a failure. With TLS 1.3, the service checks the certificate of a client after the handshake has
/// ended for the client. The client then finds the alert, or only a closed connection.
fn remedy(error: &(dyn Error + 'static), is_tls: bool) -> &'static str {
    let kinds = || {
        causes(error).into_iter().filter_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind)
    };
    let texts = || causes(error).into_iter().map(ToString::to_string);
    let is_unreachable = || {
        let is_network = |kind| {
            use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, TimedOut};
            matches!(kind, ConnectionRefused | HostUnreachable | NetworkUnreachable | TimedOut)
        };
        kinds().any(is_network) || texts().any(|text| text.contains("lookup"))
    };
    if is_tls && !is_unreachable() {
        CERTIFICATES
    } else if kinds().any(|kind| kind == io::ErrorKind::PermissionDenied) {
        "run dbg as root, or as the user of node-debug"
    } else {
        "start node-debug on the node, or give its address with --address"
    }
}
