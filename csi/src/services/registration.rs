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

use crate::connection;
use crate::driver::DriverName;
use crate::inotify::InotifyWatch;
use crate::socket::{self, SocketFile};

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
        // Never reset: the kubelet registers a second driver, too, and then this one again.
        let mut replaced_backoff = ExponentialBackoff::default();
        loop {
            let socket = self.socket();
            let wait = match self.serve(&stop, &mut backoff).await? {
                ServeEnd::Stopped => return Ok(()),
                ServeEnd::SocketRemoved if socket.exists() => {
                    let wait = replaced_backoff.next_delay();
                    tracing::warn!(
                        socket = %socket.display(),
                        ?wait,
                        "another process replaced the registration socket: probably, a second driver of this name runs on the node; stop one of \
                         them. The driver creates the socket again after the wait"
                    );
                    wait
                }
                ServeEnd::SocketRemoved => {
                    tracing::warn!(socket = %socket.display(), "the registration socket was removed; the driver creates it again");
                    continue;
                }
                ServeEnd::RegistrationFailed => {
                    let wait = backoff.next_delay();
                    tracing::warn!(
                        ?wait,
                        "the kubelet could not register the driver; the driver creates the registration socket again after the wait"
                    );
                    wait
                }
            };
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return Ok(());
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
                    if !file.path().is_in_place() {
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
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    use std::path::Path;
    use std::time::{Duration, Instant};

    use csi_wire::registration::registration_client::RegistrationClient;
    use nix::libc::O_PATH;
    use tempfile::TempDir;
    use tokio::task::JoinHandle;
    use tonic::transport::{Channel, Endpoint};

    use super::*;
    use crate::tests::{RawClient, header_block};

    /// The identity of a socket that existed. The file is kept open, because the inode number of a removed file is reused.
    #[derive(Debug)]
    struct SocketIdentity(File);

    impl SocketIdentity {
        fn at(path: &Path) -> io::Result<Self> {
            OpenOptions::new().read(true).custom_flags(O_PATH).open(path).map(Self)
        }
    }

    impl PartialEq for SocketIdentity {
        fn eq(&self, other: &Self) -> bool {
            let [one, other] = [self, other].map(|Self(file)| file.metadata().unwrap());
            (one.dev(), one.ino()) == (other.dev(), other.ino())
        }
    }

    struct RunningRegistrar {
        directory: TempDir,
        stop: CancellationToken,
        task: JoinHandle<anyhow::Result<()>>,
    }

    fn registrar(directory: &Path) -> Registrar {
        Registrar {
            driver_name: "csi.loopfs.dev".parse().unwrap(),
            directory: directory.to_owned(),
            csi_socket: "/var/lib/kubelet/plugins/csi.loopfs.dev/csi.sock".into(),
            registered: watch::Sender::new(false),
        }
    }

    impl RunningRegistrar {
        fn start() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let stop = CancellationToken::new();
            let task = tokio::spawn(registrar(directory.path()).run(stop.clone()));
            Self { directory, stop, task }
        }

        fn socket(&self) -> PathBuf {
            self.directory.path().join("csi.loopfs.dev-reg.sock")
        }

        /// Waits until there is a socket.
        async fn first_socket(&self) -> SocketIdentity {
            self.socket_that(|_| true).await
        }

        /// Waits until there is another socket than `other`.
        async fn socket_after(&self, other: &SocketIdentity) -> SocketIdentity {
            self.socket_that(|seen| seen != other).await
        }

        async fn socket_that(&self, fits: impl Fn(&SocketIdentity) -> bool) -> SocketIdentity {
            let watch = InotifyWatch::new().unwrap();
            watch.add_directory(self.directory.path()).unwrap();
            let appears = async {
                loop {
                    match SocketIdentity::at(&self.socket()) {
                        Ok(seen) if fits(&seen) => return seen,
                        _ => drop(watch.changed().await.unwrap()),
                    }
                }
            };
            tokio::time::timeout(Duration::from_secs(60), appears)
                .await
                .expect("the expected socket appears in time")
        }

        fn kubelet(&self) -> RegistrationClient<Channel> {
            let address = format!("unix://{}", self.socket().display());
            // The first call connects, and returns the error.
            RegistrationClient::new(Endpoint::try_from(address).unwrap().connect_lazy())
        }

        async fn notify(&self, plugin_registered: bool) {
            let status = wire::RegistrationStatus { plugin_registered, error: String::new() };
            self.kubelet().notify_registration_status(status).await.unwrap();
        }

        async fn stop(self) {
            self.stop.cancel();
            self.task.await.unwrap().unwrap();
            assert_eq!(
                fs::read_dir(self.directory.path()).unwrap().count(),
                0,
                "the registration socket was not removed"
            );
        }
    }

    #[tokio::test]
    async fn get_info_returns_name_and_socket() {
        let running = RunningRegistrar::start();
        running.first_socket().await;
        let info = running.kubelet().get_info(wire::InfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.r#type, "CSIPlugin");
        assert_eq!(info.name, "csi.loopfs.dev");
        assert_eq!(info.endpoint, "/var/lib/kubelet/plugins/csi.loopfs.dev/csi.sock");
        assert_eq!(info.supported_versions, ["1.0.0"]);
        running.stop().await;
    }

    /// grpc-go sends the path as the authority if it was given a bare path.
    #[tokio::test]
    async fn request_with_path_as_authority_succeeds() {
        let running = RunningRegistrar::start();
        running.first_socket().await;
        let authority = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fcsi.loopfs.dev-reg.sock";
        let first = header_block("/pluginregistration.Registration/GetInfo", authority);
        // In the dynamic table its fields are entries 65 (the oldest) down to 62.
        let second = [0x83, 0x86, 0xc1, 0xc0, 0xbf, 0xbe];
        let mut kubelet = RawClient::connect(&running.socket()).await;
        for (stream, block) in [(1, &first[..]), (3, &second[..])] {
            kubelet.call(stream, block).await;
            kubelet.receive(b"CSIPlugin").await;
        }
        drop(kubelet);
        running.stop().await;
    }

    #[tokio::test]
    async fn a_successful_registration_keeps_the_socket() {
        let running = RunningRegistrar::start();
        let socket = running.first_socket().await;
        running.notify(true).await;
        running.kubelet().get_info(wire::InfoRequest {}).await.unwrap();
        assert_eq!(SocketIdentity::at(&running.socket()).unwrap(), socket);
        running.stop().await;
    }

    #[tokio::test]
    async fn failed_registration_recreates_the_socket() {
        let running = RunningRegistrar::start();
        let socket = running.first_socket().await;
        running.notify(false).await;
        running.socket_after(&socket).await;
        running.kubelet().get_info(wire::InfoRequest {}).await.unwrap();
        running.stop().await;
    }

    #[tokio::test]
    async fn a_removed_socket_is_created_again() {
        let running = RunningRegistrar::start();
        let socket = running.first_socket().await;
        fs::remove_file(running.socket()).unwrap();
        running.socket_after(&socket).await;
        running.kubelet().get_info(wire::InfoRequest {}).await.unwrap();
        running.stop().await;
    }

    /// Each of them would otherwise replace the socket as soon as the other one has.
    #[tokio::test]
    async fn a_second_driver_waits_longer_and_longer() {
        let start = Instant::now();
        let running = RunningRegistrar::start();
        let second = tokio::spawn(registrar(running.directory.path()).run(running.stop.clone()));
        let mut socket = running.first_socket().await;
        for _ in 0..4 {
            socket = running.socket_after(&socket).await;
        }
        // The third and the fourth socket appear a second after the one before, and the fifth after two seconds.
        assert!(
            start.elapsed() >= Duration::from_secs(4),
            "the sockets were replaced within {:?}",
            start.elapsed()
        );
        // The other driver may replace the socket during the call, and waits longer each time.
        let responds = async {
            while running.kubelet().get_info(wire::InfoRequest {}).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), responds).await.expect("a driver responds");
        running.stop.cancel();
        second.await.unwrap().unwrap();
        running.stop().await;
    }

    #[tokio::test]
    async fn removed_registration_directory_ends_task() {
        let running = RunningRegistrar::start();
        running.first_socket().await;
        fs::remove_dir_all(running.directory.path()).unwrap();
        let error = running.task.await.unwrap().unwrap_err();
        assert!(
            format!("{error:#}").contains(running.directory.path().to_str().unwrap())
                || error.to_string().contains("removed"),
            "{error:#}"
        );
    }
}
