//! The connection to the service, and the explanation of its failures.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::proto::node_debug_client::NodeDebugClient;
use crate::proto::{DescribeRequest, DescribeResponse};

/// After this time without a response, the client asks whether the service still runs, and waits as long for the answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The connected service.
pub(super) struct Client {
    pub(super) service: NodeDebugClient<Channel>,
    socket: PathBuf,
}

impl Client {
    pub(super) async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let address = format!("unix://{}", socket.display());
        let endpoint =
            Endpoint::from_shared(address).with_context(|| format!("use socket {}", socket.display()))?;
        let endpoint = endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
        let channel = endpoint.connect().await.map_err(|error| {
            let cause = root_cause(&error);
            let is_denied = cause
                .downcast_ref()
                .is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied);
            let remedy = if is_denied {
                "run dbg as root, or as the user of node-debug"
            } else {
                "start node-debug on the node, or give its socket with --socket"
            };
            anyhow!("connect to node-debug at {}: {cause}; {remedy}", socket.display())
        })?;
        Ok(Self { service: NodeDebugClient::new(channel), socket: socket.to_owned() })
    }

    /// Returns what the service offers.
    pub(super) async fn describe(&mut self) -> anyhow::Result<DescribeResponse> {
        let described = self.service.describe(DescribeRequest {}).await;
        Ok(described.map_err(|status| self.explain(status))?.into_inner())
    }

    /// Explains a failed call in one line.
    pub(super) fn explain(&self, status: Status) -> anyhow::Error {
        let reason = match status.source() {
            // The transport failed, not the service.
            Some(source) => format!("{}; see whether node-debug still runs", root_cause(source)),
            // Such a status has no message.
            None if status.code() == Code::Unimplemented => {
                "another program listens there, or another version of node-debug; check --socket".to_owned()
            }
            None => return anyhow!("{}", status.message()),
        };
        anyhow!("call node-debug at {}: {reason}", self.socket.display())
    }
}

/// Returns the innermost cause: the outer ones only say "transport error".
fn root_cause<'a>(mut error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    while let Some(cause) = error.source() {
        error = cause;
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unknown_call_reports_version_mismatch() {
        let channel = Endpoint::from_static("unix:///socket").connect_lazy();
        let client = Client { service: NodeDebugClient::new(channel), socket: "/socket".into() };
        let error = client.explain(Status::new(Code::Unimplemented, "")).to_string();
        assert!(error.contains("at /socket: ") && error.contains("another version of node-debug"), "{error}");
    }
}
