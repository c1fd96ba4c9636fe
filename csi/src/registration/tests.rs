use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::proto::registration::registration_client::RegistrationClient;

struct Running {
    directory: TempDir,
    stop: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Running {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let registrar = Registrar {
            driver_name: "csi.loopfs.dev".parse().unwrap(),
            directory: directory.path().to_owned(),
            csi_socket: "/var/lib/kubelet/plugins/csi.loopfs.dev/csi.sock".into(),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(registrar.run(stop.clone()));
        Self { directory, stop, task }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("csi.loopfs.dev-reg.sock")
    }

    /// Waits for a socket that is not `other`.
    async fn socket_unlike(&self, other: Option<u64>) -> u64 {
        let watch = DirectoryWatch::new(self.directory.path()).unwrap();
        let appears = async {
            loop {
                match fs::metadata(self.socket()) {
                    Ok(file) if Some(file.ino()) != other => return file.ino(),
                    _ => watch.changed().await.unwrap(),
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), appears).await.unwrap()
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
        assert_eq!(fs::read_dir(self.directory.path()).unwrap().count(), 0, "the socket is left behind");
    }
}

#[tokio::test]
async fn the_kubelet_learns_where_the_driver_is() {
    let running = Running::start();
    running.socket_unlike(None).await;
    let info = running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.r#type, "CSIPlugin");
    assert_eq!(info.name, "csi.loopfs.dev");
    assert_eq!(info.endpoint, "/var/lib/kubelet/plugins/csi.loopfs.dev/csi.sock");
    assert_eq!(info.supported_versions, ["1.0.0"]);
    running.stop().await;
}

#[tokio::test]
async fn a_registration_that_succeeded_leaves_the_socket_in_place() {
    let running = Running::start();
    let socket = running.socket_unlike(None).await;
    running.notify(true).await;
    running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap();
    assert_eq!(fs::metadata(running.socket()).unwrap().ino(), socket);
    running.stop().await;
}

#[tokio::test]
async fn a_registration_that_failed_is_offered_again() {
    let running = Running::start();
    let socket = running.socket_unlike(None).await;
    running.notify(false).await;
    running.socket_unlike(Some(socket)).await;
    running.kubelet().await.get_info(wire::InfoRequest {}).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_socket_that_is_removed_comes_back() {
    let running = Running::start();
    running.socket_unlike(None).await;
    // An inode number is free again at once, so the name being back is what is waited for.
    fs::remove_file(running.socket()).unwrap();
    running.socket_unlike(None).await;
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
    };
    registrar.withdraw().unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn a_registration_directory_that_is_removed_ends_the_task() {
    let running = Running::start();
    running.socket_unlike(None).await;
    fs::remove_dir_all(running.directory.path()).unwrap();
    let error = running.task.await.unwrap().unwrap_err();
    assert!(
        format!("{error:#}").contains(running.directory.path().to_str().unwrap())
            || error.to_string().contains("removed"),
        "{error:#}"
    );
}
