//! Tests of requests for conditions, and of the wait for a driver that starts.

use csi::socket;
use csi_wire::registration as wire;
use csi_wire::registration::registration_server::{Registration, RegistrationServer};
use rstest::rstest;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, async_trait};

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

fn subject(registration_dir: &std::path::Path) -> ConditionSubject {
    ConditionSubject {
        driver_name: Some("a.b".parse().unwrap()),
        registration_dir: registration_dir.to_owned(),
        data_dir: Some("/nonexistent/data".into()),
        ..ConditionSubject::default()
    }
}

async fn evaluate(subject: ConditionSubject, name: &str, arguments: &[&str]) -> Result<Evaluation, String> {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    Conditions::new(subject).evaluate(name, &arguments).await.map_err(|error| error.to_string())
}

#[rstest]
#[case::unknown("plugin", &[], "there is no condition \"plugin\"; the conditions are plugin-serving, plugin-registered, quota-enforced, node-ready, volume-published")]
#[case::too_many("plugin-serving", &["x"], "takes no argument")]
#[case::too_few("volume-published", &[], "takes one argument, VOLUME")]
#[case::bad_volume("volume-published", &["../x"], "../x")]
#[case::not_configured("node-ready", &[], "condition node-ready needs option --kubeconfig of node-debug")]
#[tokio::test]
async fn invalid_request_fails_with_one_line(
    #[case] name: &str,
    #[case] arguments: &[&str],
    #[case] message: &str,
) {
    let error = evaluate(subject("/nonexistent".as_ref()), name, arguments).await.unwrap_err();
    assert!(error.contains(message) && !error.contains('\n'), "{error}");
}

#[tokio::test]
async fn absent_volume_is_not_published() {
    let evaluation = evaluate(subject("/nonexistent".as_ref()), "volume-published", &["v"]).await.unwrap();
    assert!(!evaluation.met && evaluation.detail.contains("there is no volume v"), "{evaluation:?}");
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

fn serve(driver: &'static str, directory: &std::path::Path) -> tokio::task::JoinHandle<()> {
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
    let conditions = Conditions::new(subject(&directory));
    let before = conditions.evaluate("plugin-serving", &[]).await.unwrap();
    assert!(!before.met && before.detail.contains("does not exist"), "{before:?}");

    let waiting = tokio::spawn({
        let conditions = conditions.clone();
        async move { conditions.wait("plugin-serving", &[], Instant::now() + HOUR).await.unwrap() }
    });
    tokio::task::yield_now().await;
    std::fs::create_dir(&directory).unwrap();
    let driver = serve("a.b", &directory);
    let met = tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("the wait ends").unwrap();
    assert_eq!(met, Evaluation::met("driver a.b serves /csi.sock"));
    driver.abort();
}

#[tokio::test]
async fn socket_of_another_plugin_is_ignored() {
    let scratch = tempfile::tempdir().unwrap();
    let driver = serve("other", scratch.path());
    let evaluation = evaluate(subject(scratch.path()), "plugin-serving", &[]).await.unwrap();
    assert!(!evaluation.met && evaluation.detail.contains("another plugin, \"other\""), "{evaluation:?}");
    driver.abort();
}

#[tokio::test(start_paused = true)]
async fn wait_returns_reason_at_its_deadline() {
    let conditions = Conditions::new(subject("/nonexistent".as_ref()));
    let deadline = Instant::now() + HOUR;
    let evaluation = conditions.wait("plugin-serving", &[], deadline).await.unwrap();
    assert!(!evaluation.met && evaluation.detail.contains("a.b-reg.sock"), "{evaluation:?}");
}

#[tokio::test(start_paused = true)]
async fn constant_changes_do_not_extend_waits() {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let begin = Instant::now();
    let evaluate = || async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        Evaluation::not_met("not yet".to_owned())
    };
    let waiting = wait_until_met(evaluate, stream::repeat(()).boxed(), begin + TIMEOUT);
    let evaluation = tokio::time::timeout(HOUR, waiting).await.expect("the wait ends");
    assert_eq!((evaluation, begin.elapsed()), (Evaluation::not_met("not yet".to_owned()), TIMEOUT));
}

#[tokio::test(start_paused = true)]
async fn hanging_evaluation_does_not_extend_waits() {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let begin = Instant::now();
    let waiting = wait_until_met(std::future::pending, stream::repeat(()).boxed(), begin + TIMEOUT);
    let evaluation = tokio::time::timeout(HOUR, waiting).await.expect("the wait ends");
    assert!(evaluation.detail.contains("no result before the timeout"), "{evaluation:?}");
    assert_eq!(begin.elapsed(), TIMEOUT);
}
