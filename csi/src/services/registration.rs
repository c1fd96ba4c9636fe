//! Registration with the kubelet. The kubelet watches a directory for sockets and queries the plugin that listens
//! there.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use csi_wire::registration as wire;
use csi_wire::registration::registration_server::{Registration, RegistrationServer};
use service::ExponentialBackoff;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status, async_trait};

use crate::driver::DriverName;
use crate::inotify::InotifyWatch;
use crate::transport::connection;
use crate::transport::socket::{self, SocketFile};

/// The kubelet's type of CSI drivers.
const PLUGIN_TYPE: &str = "CSIPlugin";

/// The version of the CSI service. The kubelet accepts any 1.x.
const CSI_VERSION: &str = "1.0.0";

/// The registration: the driver's name, the directory and the CSI socket.
#[derive(Clone, Debug)]
pub(crate) struct Registrar {
    pub(crate) driver_name: DriverName,
    /// The kubelet's `plugins_registry` directory.
    pub(crate) directory: PathBuf,
    /// The path of the CSI socket in the kubelet's mount namespace.
    pub(crate) csi_socket: PathBuf,
    /// `true` once the kubelet has registered the driver.
    pub(crate) registered: watch::Sender<bool>,
}

/// The reason why a registration socket is no longer served.
enum ServeEnd {
    /// The process stops.
    Stopped,
    /// The kubelet could not register the driver.
    RegistrationFailed,
    /// Another process removed or replaced the socket. A kubelet may do so when it starts.
    SocketRemoved,
}

impl Registrar {
    fn socket(&self) -> PathBuf {
        self.directory.join(self.driver_name.registration_socket())
    }

    /// Removes the socket of an earlier process, so that the kubelet unregisters a driver that cannot serve yet.
    pub(crate) fn remove_stale_socket(&self) -> anyhow::Result<()> {
        socket::remove_stale(&self.socket())
    }

    /// Keeps the driver registered until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let mut backoff = ExponentialBackoff::default();
        loop {
            match self.serve(&stop, &mut backoff).await? {
                ServeEnd::Stopped => return Ok(()),
                ServeEnd::SocketRemoved => {
                    tracing::warn!(socket = %self.socket().display(), "the registration socket was removed; the driver creates it again")
                }
                ServeEnd::RegistrationFailed => {
                    let wait = backoff.next_delay();
                    tracing::warn!(
                        ?wait,
                        "the kubelet could not register the driver; the driver creates the registration socket again after the wait"
                    );
                    if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Serves one socket until the driver must register again, or until `stop`.
    async fn serve(
        &self,
        stop: &CancellationToken,
        backoff: &mut ExponentialBackoff,
    ) -> anyhow::Result<ServeEnd> {
        // The watch starts before the socket exists, so that no removal is missed.
        let watch = InotifyWatch::new()?;
        watch.add_directory(&self.directory)?;
        let (listener, file) = socket::listen(&self.socket(), socket::OF_ROOT)?;
        let (sender, mut outcomes) = mpsc::unbounded_channel();
        let service =
            RegistrationServer::new(RegistrationService { registrar: self.clone(), outcomes: sender });
        let end_of_socket = CancellationToken::new();
        let server = Server::builder().add_service(service).serve_with_incoming_shutdown(
            connection::incoming(listener),
            end_of_socket.clone().cancelled_owned(),
        );
        let mut server = std::pin::pin!(server);
        tracing::info!(socket = %self.socket().display(), "waiting for the kubelet to register the driver");
        let end = loop {
            tokio::select! {
                () = stop.cancelled() => break ServeEnd::Stopped,
                ended = &mut server => {
                    ended.context("serve the registration socket")?;
                    bail!("the registration socket was closed");
                }
                is_gone = watch.changed() => {
                    // This process cannot see a new directory of that name through its mount.
                    ensure!(!is_gone?, "the registration directory was removed or renamed");
                    if !file.is_in_place() {
                        break ServeEnd::SocketRemoved;
                    }
                }
                Some(registered) = outcomes.recv() => {
                    if !registered {
                        break ServeEnd::RegistrationFailed;
                    }
                    backoff.reset();
                }
            }
        };
        // The socket is removed first, so that the kubelet sees no driver. A running call may then finish.
        drop::<SocketFile>(file);
        self.registered.send_replace(false);
        end_of_socket.cancel();
        server.await.context("serve the registration socket")?;
        Ok(end)
    }
}

struct RegistrationService {
    registrar: Registrar,
    outcomes: mpsc::UnboundedSender<bool>,
}

#[async_trait]
impl Registration for RegistrationService {
    async fn get_info(
        &self,
        _request: Request<wire::InfoRequest>,
    ) -> Result<Response<wire::PluginInfo>, Status> {
        Ok(Response::new(wire::PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: self.registrar.driver_name.to_string(),
            endpoint: self.registrar.csi_socket.display().to_string(),
            supported_versions: vec![CSI_VERSION.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        let wire::RegistrationStatus { plugin_registered, error } = request.into_inner();
        if plugin_registered {
            tracing::info!("the kubelet has registered the driver");
        } else {
            tracing::error!(?error, "the kubelet could not register the driver");
        }
        self.registrar.registered.send_replace(plugin_registered);
        // The receiver is dropped after the socket was removed. The kubelet's notification through the next socket then
        // counts.
        self.outcomes.send(plugin_registered).ok();
        Ok(Response::new(wire::RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests;
