use std::future::pending;
use std::sync::{Arc, Mutex};

use csi_wire::volumes::volumes_server::{Volumes, VolumesServer};
use loopfs::{ErrorKind, FilesystemUuid};
use rstest::rstest;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Request};

use super::*;
use crate::testing::fixtures;

const ID: &str = "pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";

/// What the driver does with a call.
#[derive(Clone, Copy)]
enum Behaviour {
    Answer,
    /// Fails with this reason, or with none, as a driver does that ends.
    Fail(Option<Reason>),
    Hang,
}

struct FakeDriver {
    behaviour: Behaviour,
    created: Mutex<Option<wire::CreateRequest>>,
}

impl FakeDriver {
    async fn answer<T>(&self, answer: T) -> Result<Response<T>, Status> {
        match self.behaviour {
            Behaviour::Answer => Ok(Response::new(answer)),
            Behaviour::Fail(reason) => {
                let mut status = Status::new(Code::Aborted, "why");
                if let Some(reason) = reason {
                    reason.add_to(&mut status);
                }
                Err(status)
            }
            Behaviour::Hang => pending().await,
        }
    }
}

type Items<T> = BoxStream<'static, Result<T, Status>>;

fn items<T: Send + 'static>(items: impl IntoIterator<Item = T, IntoIter: Send + 'static>) -> Items<T> {
    stream::iter(items.into_iter().map(Ok)).boxed()
}

fn volume(id: &str, annotations: &[(&str, &str)]) -> wire::Volume {
    let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    wire::Volume { volume_id: id.to_owned(), pending: true, annotations: annotations.collect() }
}

fn page(volumes: Vec<wire::Volume>) -> wire::ListPage {
    wire::ListPage { filesystem_uuid: fixtures::FILESYSTEM.to_owned(), volumes }
}

#[tonic::async_trait]
impl Volumes for FakeDriver {
    type WatchStream = Items<wire::NodeState>;
    type ListStream = Items<wire::ListPage>;
    type ListForeignFilesStream = Items<wire::ForeignFiles>;

    /// Sends one state for each value, and ends.
    async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let state = |storage| wire::NodeState {
            storage,
            reason: "why".to_owned(),
            filesystem_uuid: "uuid".to_owned(),
            space: 1,
            freed: 2,
            foreign_files: 3,
        };
        self.answer(items((0..4).map(state))).await
    }

    async fn create(
        &self,
        request: Request<wire::CreateRequest>,
    ) -> Result<Response<wire::CreateResponse>, Status> {
        let request = request.into_inner();
        let capacity = request.capacity;
        *self.created.lock().unwrap() = Some(request);
        self.answer(wire::CreateResponse { capacity, filesystem_uuid: "uuid".to_owned(), held_data: true })
            .await
    }

    async fn expand(
        &self,
        request: Request<wire::ExpandRequest>,
    ) -> Result<Response<wire::ExpandResponse>, Status> {
        let capacity = request.into_inner().capacity;
        self.answer(wire::ExpandResponse { capacity, devices_refreshed: true }).await
    }

    async fn delete(
        &self,
        _: Request<wire::DeleteRequest>,
    ) -> Result<Response<wire::DeleteResponse>, Status> {
        self.answer(wire::DeleteResponse { existed: true }).await
    }

    async fn confirm(
        &self,
        _: Request<wire::ConfirmRequest>,
    ) -> Result<Response<wire::ConfirmResponse>, Status> {
        self.answer(wire::ConfirmResponse {}).await
    }

    /// Lists the pending volume of a claim, and those of others.
    async fn list(&self, _: Request<wire::ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let of_claim = [("claim", "shop/data"), ("uid", &ID[4..]), ("class", "loopfs")];
        let confirmed = wire::Volume { pending: false, ..volume("csi-1", &[]) };
        let pages = [
            page(vec![volume(ID, &of_claim), volume("copy", &of_claim)]),
            page(vec![volume("by-hand", &[]), confirmed]),
        ];
        self.answer(items(pages)).await
    }

    async fn capacity(
        &self,
        request: Request<wire::CapacityRequest>,
    ) -> Result<Response<wire::CapacityResponse>, Status> {
        let available = request.into_inner().settings.len() as u64;
        self.answer(wire::CapacityResponse { available, largest_volume: 7 }).await
    }

    async fn take_custody(
        &self,
        request: Request<wire::TakeCustodyRequest>,
    ) -> Result<Response<wire::TakeCustodyResponse>, Status> {
        let found = vec![request.into_inner().node_uid];
        self.answer(wire::TakeCustodyResponse { filesystem_uuid: "uuid".to_owned(), found }).await
    }

    async fn list_foreign_files(
        &self,
        _: Request<wire::ListForeignFilesRequest>,
    ) -> Result<Response<Self::ListForeignFilesStream>, Status> {
        self.answer(items([wire::ForeignFiles::default()])).await
    }
}

/// A driver that serves, and a client of it.
struct TestDriver {
    client: DriverClient,
    driver: Arc<FakeDriver>,
    _directory: tempfile::TempDir,
}

fn serve(behaviour: Behaviour) -> TestDriver {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let driver = Arc::new(FakeDriver { behaviour, created: Mutex::default() });
    listen(&socket, Arc::clone(&driver));
    TestDriver { client: DriverClient::new(&socket).unwrap(), driver, _directory: directory }
}

fn listen(socket: &Path, driver: Arc<FakeDriver>) {
    let connections = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    let server = Server::builder().add_service(VolumesServer::from_arc(driver));
    tokio::spawn(server.serve_with_incoming(connections));
}

fn id() -> VolumeId {
    VolumeId::parse(ID).unwrap()
}

async fn delete_error(client: &DriverClient) -> StorageError {
    client.delete(&id(), Some("expected")).await.unwrap_err()
}

fn of_volume(kind: ErrorKind) -> StorageError {
    StorageError::Volume(VolumeError { kind, message: "why".to_owned() })
}

fn unavailable() -> StorageError {
    StorageError::Unavailable("why".to_owned())
}

#[rstest]
#[case::no_space(Reason::Store(ErrorKind::NoSpace), of_volume(ErrorKind::NoSpace))]
#[case::busy(Reason::Store(ErrorKind::Busy), of_volume(ErrorKind::Busy))]
#[case::other(Reason::Store(ErrorKind::Other), of_volume(ErrorKind::Other))]
#[case::not_mounted(Reason::Store(ErrorKind::NotMounted), unavailable())]
#[case::never_mounted(Reason::Store(ErrorKind::NeverMounted), unavailable())]
#[case::not_enforced(Reason::Store(ErrorKind::NotEnforced), unavailable())]
#[case::wrong_filesystem(Reason::Store(ErrorKind::WrongFilesystem), unavailable())]
#[case::read_only(Reason::Store(ErrorKind::ReadOnly), unavailable())]
#[case::shut_down(Reason::Store(ErrorKind::ShutDown), unavailable())]
#[case::unavailable(Reason::Unavailable, unavailable())]
#[case::pending(Reason::Pending, StorageError::Pending("why".to_owned()))]
#[case::defect(Reason::Defect, StorageError::Defect("why".to_owned()))]
#[tokio::test]
async fn each_reason_is_an_error(#[case] reason: Reason, #[case] expected: StorageError) {
    assert_eq!(delete_error(&serve(Behaviour::Fail(Some(reason))).client).await, expected);
}

#[tokio::test]
async fn other_filesystem_error_names_both() {
    let present: FilesystemUuid = fixtures::FILESYSTEM.parse().unwrap();
    let driver = serve(Behaviour::Fail(Some(Reason::OtherFilesystem(present))));
    let expected = StorageError::OtherFilesystem {
        of_volume: "expected".to_owned(),
        of_node: fixtures::FILESYSTEM.to_owned(),
    };
    assert_eq!(delete_error(&driver.client).await, expected);
}

/// Checks that the error names the cause, the socket and the remedy.
fn check_unanswered(error: &StorageError, cause: &str) {
    let StorageError::Unanswered(text) = error else { panic!("{error:?}") };
    for part in [cause, "control.sock", "check that the container csi or the service loopfs-csi runs"] {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test]
async fn error_without_reason_is_unanswered() {
    check_unanswered(&delete_error(&serve(Behaviour::Fail(None)).client).await, ": why;");
}

#[tokio::test]
async fn missing_socket_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let client = DriverClient::new(&directory.path().join("control.sock")).unwrap();
    check_unanswered(&delete_error(&client).await, "No such file or directory");
    check_unanswered(&client.watch().await.err().unwrap(), "No such file or directory");
}

#[tokio::test]
async fn client_reconnects_after_driver_restart() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let client = DriverClient::new(&socket).unwrap();
    for _ in 0..2 {
        check_unanswered(&delete_error(&client).await, "");
        // The driver and its connections end with this runtime.
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let inside = runtime.enter();
        listen(&socket, Arc::new(FakeDriver { behaviour: Behaviour::Answer, created: Mutex::default() }));
        drop(inside);
        assert_eq!(client.delete(&id(), None).await, Ok(true));
        tokio::task::spawn_blocking(|| drop(runtime)).await.unwrap();
        std::fs::remove_file(&socket).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn unanswered_call_ends_at_deadline() {
    let driver = serve(Behaviour::Hang);
    check_unanswered(&delete_error(&driver.client).await, "no response within 120s");
    check_unanswered(
        &driver.client.confirm(&id(), fixtures::FILESYSTEM).await.unwrap_err(),
        "no response within 60s",
    );
}

/// The kernel accepts the connection, and the driver never reads from it.
#[tokio::test(start_paused = true)]
async fn hung_driver_is_found_by_ping() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let client = DriverClient::new(&socket).unwrap();
    check_unanswered(&client.watch().await.err().unwrap(), "");
}

#[tokio::test]
async fn the_states_end_with_the_connection() {
    let driver = serve(Behaviour::Answer);
    let mut states: Vec<_> = driver.client.watch().await.unwrap().collect().await;
    check_unanswered(&states.pop().unwrap().unwrap_err(), "the driver ended the connection");
    let why = || "why".to_owned();
    let expected = [
        StorageState::Untried,
        StorageState::Absent(why()),
        StorageState::Unavailable(why()),
        StorageState::Open { filesystem_uuid: "uuid".to_owned() },
    ];
    let expected = expected.map(|storage| Ok(NodeState { storage, space: 1, freed: 2, foreign_files: 3 }));
    assert_eq!(states, expected);
}

#[rstest]
#[case::empty(None, None)]
#[case::of_a_volume(
    Some(OwnedContentSource::Volume(VolumeId::parse("a").unwrap())),
    Some(wire::create_request::Source::Volume("a".to_owned()))
)]
#[tokio::test]
async fn creation_request_is_complete(
    #[case] source: Option<OwnedContentSource>,
    #[case] expected: Option<wire::create_request::Source>,
) {
    let driver = serve(Behaviour::Answer);
    let pair = || [("name".to_owned(), "value".to_owned())];
    let volume = NewVolume {
        id: id(),
        kind: VolumeKind::Block,
        capacity: Bytes::MIB,
        settings: pair().into(),
        annotations: Annotations::new(pair()).unwrap(),
        source,
    };
    let created = driver.client.create(volume).await.unwrap();
    assert_eq!((created.capacity, created.held_data), (Bytes::MIB.0, true));
    let expected = wire::CreateRequest {
        volume_id: ID.to_owned(),
        kind: wire::Kind::Block.into(),
        capacity: Bytes::MIB.0,
        settings: pair().into(),
        annotations: pair().into(),
        source: expected,
    };
    assert_eq!(driver.driver.created.lock().unwrap().take(), Some(expected));
}

#[tokio::test]
async fn other_programs_pending_volumes_are_skipped() {
    let driver = serve(Behaviour::Answer);
    let list = driver.client.list(false).await.unwrap();
    assert_eq!(list.filesystem_uuid, fixtures::FILESYSTEM);
    let names: Vec<_> = list.volumes.iter().map(VolumeId::as_str).collect();
    assert_eq!(names, ["by-hand", "copy", "csi-1", ID]);
    assert_eq!(list.pending.keys().collect::<Vec<_>>(), [&id()]);
    assert_eq!(driver.client.list(true).await.unwrap().pending, list.pending);
}

#[tokio::test]
async fn other_responses_are_read() {
    let TestDriver { client, driver: _driver, _directory } = serve(Behaviour::Answer);
    let expanded = wire::ExpandResponse { capacity: Bytes::MIB.0, devices_refreshed: true };
    assert_eq!(client.expand(&id(), Bytes::MIB, None).await, Ok(expanded));
    assert_eq!(client.delete(&id(), None).await, Ok(true));
    assert_eq!(client.confirm(&id(), fixtures::FILESYSTEM).await, Ok(()));
    let capacity = wire::CapacityResponse { available: 1, largest_volume: 7 };
    let settings = [("name".to_owned(), "value".to_owned())].into();
    assert_eq!(client.capacity(&settings).await, Ok(capacity));
    let custody = Custody { filesystem_uuid: "uuid".to_owned(), found: ["node".to_owned()].into() };
    assert_eq!(client.take_custody("node").await, Ok(custody));
    assert_eq!(client.foreign_files().await.map(|found| found.len()), Ok(1));
}
