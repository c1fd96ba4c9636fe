//! The listener, and who may connect to it.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use csi::socket::{self, SocketFile};
use nix::unistd::{Uid, geteuid};
use service::Tasks;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use crate::args::Args;
use crate::protected;
use crate::proto::node_debug_server::NodeDebugServer;
use crate::service::NodeDebugService;

/// The longest time that open calls may take after the shutdown was requested.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the service until `stop`.
///
/// # Errors
/// The socket could not be opened, or a component is given twice.
pub async fn serve(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let mut names: Vec<&str> = args.logs.iter().map(|log| log.name.as_str()).collect();
    names.sort_unstable();
    for pair in names.windows(2) {
        ensure!(pair[0] != pair[1], "component {} is given twice (--log)", pair[0]);
    }
    let (listener, _removed_on_drop) =
        listen(&args.socket).await.context("open the socket of the service (--socket)")?;
    tracing::info!(socket = %args.socket.display(), version = env!("CARGO_PKG_VERSION"), "serving");
    let service = NodeDebugService::new(args, stop.clone());
    let server = Server::builder()
        .add_service(InterceptedService::new(NodeDebugServer::new(service), admit_peer))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.clone().cancelled_owned());
    let mut tasks = Tasks::new(stop);
    tasks.try_spawn("unix socket", async { server.await.context("serve the unix socket") });
    tasks.finish(SHUTDOWN_TIMEOUT).await
}

/// Listens on a unix socket in a directory in which no other user can replace it, unless another process does: that would lose its clients
/// without notice.
async fn listen(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    let path = &protected::path(path)?;
    match UnixStream::connect(path).await {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
        // Its queue is full, it is a socket of another type, or this user may not connect.
        Ok(_) | Err(_) => {
            bail!("another process listens on {}; stop it, or choose another path", path.display())
        }
    }
    socket::listen(path, socket::OF_ROOT)
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
