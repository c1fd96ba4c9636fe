//! Tests of requests for conditions, and of the wait for a driver that starts.

use std::path::Path;

use csi::socket;
use csi_wire::registration as wire;
use csi_wire::registration::registration_server::{Registration, RegistrationServer};
use rstest::rstest;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, async_trait};

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

fn conditions(registration_dir: &Path) -> Conditions {
    Conditions {
        driver_name: Some("a.b".parse().unwrap()),
        registration_dir: registration_dir.to_owned(),
        data_dir: Some("/nonexistent/data".into()),
        ..Conditions::default()
    }
}

#[rstest]
#[case::unknown(
    "plugin",
    "",
    "there is no condition \"plugin\"; the conditions are plugin-serving, plugin-registered, quota-enforced, node-ready, volume-published VOLUME"
)]
#[case::too_many("plugin-serving", "x", "there is no condition \"plugin-serving x\"")]
#[case::too_few("volume-published", "", "there is no condition \"volume-published\"")]
#[case::bad_volume("volume-published", "../x", "../x")]
#[case::not_configured("node-ready", "", "condition node-ready needs option --kubeconfig of node-debug")]
fn invalid_request_fails_with_one_line(#[case] name: &str, #[case] argument: &str, #[case] message: &str) {
    let error = conditions("/nonexistent".as_ref()).query(name, argument).err().unwrap();
    let error = error.message();
    assert!(error.contains(message) && !error.contains('\n'), "{error}");
}

/// Such as for want of an option; only an unknown condition is not found.
#[test]
fn every_listed_condition_is_known() {
    for (name, argument, _) in CONDITIONS {
        let query = Conditions::default().query(name, argument);
        assert!(query.is_err_and(|error| error.code() != tonic::Code::NotFound), "{name}");
    }
}

#[tokio::test]
async fn absent_volume_is_not_published() {
    let evaluated = conditions("/nonexistent".as_ref()).evaluate("volume-published", "v").await.unwrap();
    assert!(!evaluated.met && evaluated.detail.contains("there is no volume v"), "{evaluated:?}");
}

/// A driver that registers under this name.
struct FakeDriver(&'static str);

#[async_trait]
impl Registration for FakeDriver {
    async fn get_info(&self, _: Request<wire::InfoRequest>) -> Result<Response<wire::PluginInfo>, Status> {
        let info = wire::PluginInfo {
            name: self.0.to_owned(),
            endpoint: "/csi.sock".to_owned(),
            ..Default::default()
        };
        Ok(Response::new(info))
    }

    async fn notify_registration_status(
        &self,
        _: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        Err(Status::unimplemented("the test is no kubelet"))
    }
}

fn serve(driver: &'static str, directory: &Path) -> tokio::task::JoinHandle<()> {
    let (listener, file) = socket::listen(&directory.join("a.b-reg.sock"), socket::OF_ROOT).unwrap();
    tokio::spawn(async move {
        let _file = file;
        let server =
            tonic::transport::Server::builder().add_service(RegistrationServer::new(FakeDriver(driver)));
        server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
    })
}

#[tokio::test]
async fn wait_ends_when_driver_serves_socket() {
    let scratch = tempfile::tempdir().unwrap();
    // The kubelet has not created the directory yet.
    let directory = scratch.path().join("plugins_registry");
    let conditions = conditions(&directory);
    let before = conditions.evaluate("plugin-serving", "").await.unwrap();
    assert!(!before.met && before.detail.contains("the driver is not running"), "{before:?}");

    let mut waiting = std::pin::pin!(conditions.wait("plugin-serving", "", Instant::now() + HOUR));
    assert!(futures::poll!(&mut waiting).is_pending());
    std::fs::create_dir(&directory).unwrap();
    let driver = serve("a.b", &directory);
    let met = tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("the wait ends").unwrap();
    assert!(met.met && met.detail == "driver a.b serves /csi.sock", "{met:?}");
    driver.abort();
}

#[tokio::test]
async fn socket_of_another_plugin_is_ignored() {
    let scratch = tempfile::tempdir().unwrap();
    let driver = serve("other", scratch.path());
    let evaluated = conditions(scratch.path()).evaluate("plugin-serving", "").await.unwrap();
    assert!(!evaluated.met && evaluated.detail.contains("another plugin, \"other\""), "{evaluated:?}");
    driver.abort();
}

#[tokio::test(start_paused = true)]
async fn wait_returns_last_reason_at_deadline() {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let begin = Instant::now();
    let evaluate = || async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        Err(anyhow::anyhow!("not yet"))
    };
    let last = wait_until_met(evaluate, begin + TIMEOUT).await;
    assert!(!last.met && last.detail == "not yet", "{last:?}");
    assert_eq!(begin.elapsed(), TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn hanging_evaluation_does_not_extend_waits() {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let begin = Instant::now();
    let last = wait_until_met(std::future::pending, begin + TIMEOUT).await;
    assert!(last.detail.contains("no result before the timeout"), "{last:?}");
    assert_eq!(begin.elapsed(), TIMEOUT);
}
