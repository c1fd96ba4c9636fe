use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use csi_wire::registration::registration_client::RegistrationClient;
use nix::libc::O_PATH;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::transport::raw_client::{RawClient, header_block};

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

impl RunningRegistrar {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let registrar = Registrar {
            driver_name: "csi.loopfs.dev".parse().unwrap(),
            directory: directory.path().to_owned(),
            csi_socket: "/var/lib/kubelet/plugins/csi.loopfs.dev/csi.sock".into(),
            registered: watch::Sender::new(false),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(registrar.run(stop.clone()));
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

    async fn kubelet(&self) -> RegistrationClient<Channel> {
        let address = format!("unix://{}", self.socket().display());
        let channel = Endpoint::try_from(address).unwrap().connect().await.unwrap();
        RegistrationClient::new(channel)
    }

    async fn notify(&self, plugin_registered: bool) {
        let status = wire::RegistrationStatus { plugin_registered, error: String::new() };
        self.kubelet().await.notify_registration_status(status).await.unwrap();
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
async fn get_info_returns_the_name_and_the_csi_socket() {
    let running = RunningRegistrar::start();
    running.first_socket().await;
    let info = running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.r#type, "CSIPlugin");
    assert_eq!(info.name, "csi.loopfs.dev");
    assert_eq!(info.endpoint, "/var/lib/kubelet/plugins/csi.loopfs.dev/csi.sock");
    assert_eq!(info.supported_versions, ["1.0.0"]);
    running.stop().await;
}

/// grpc-go sends the path as the authority if it was given a bare path.
#[tokio::test]
async fn a_request_with_the_path_as_authority_succeeds() {
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
    running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap();
    assert_eq!(SocketIdentity::at(&running.socket()).unwrap(), socket);
    running.stop().await;
}

#[tokio::test]
async fn a_failed_registration_creates_the_socket_again() {
    let running = RunningRegistrar::start();
    let socket = running.first_socket().await;
    running.notify(false).await;
    running.socket_after(&socket).await;
    running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_removed_socket_is_created_again() {
    let running = RunningRegistrar::start();
    let socket = running.first_socket().await;
    fs::remove_file(running.socket()).unwrap();
    running.socket_after(&socket).await;
    running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_stale_socket_of_an_earlier_process_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.b-reg.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let registrar = Registrar {
        driver_name: "a.b".parse().unwrap(),
        directory: directory.path().to_owned(),
        csi_socket: "/s".into(),
        registered: watch::Sender::new(false),
    };
    registrar.remove_stale_socket().unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn removing_the_registration_directory_ends_the_task() {
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
