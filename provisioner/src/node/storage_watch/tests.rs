use csi_wire::volumes::ForeignFiles;
use loopfs::ErrorKind;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::testing::fake_store::{self, FakeStore};
use crate::testing::fixtures;
use crate::testing::mock_api_server::TestContext;

/// A task that follows the state of a driver.
struct Following {
    test_context: TestContext,
    task: JoinHandle<()>,
}

impl Following {
    /// Starts to follow a driver whose state is unknown.
    async fn begin(prepare: impl FnOnce(&FakeStore)) -> Self {
        let test_context = TestContext::new(vec![]);
        prepare(&test_context.volumes);
        test_context.ctx.storage.set(StorageState::Untried);
        let task = tokio::spawn(run(Arc::clone(&test_context.ctx)));
        let following = Following { test_context, task };
        following.settle().await;
        following
    }

    /// Waits until all tasks wait. The time is paused.
    async fn settle(&self) {
        sleep(Duration::from_millis(1)).await;
    }

    fn volumes(&self) -> &FakeStore {
        &self.test_context.volumes
    }

    fn generation(&self) -> u64 {
        *self.test_context.ctx.retry_generation.borrow()
    }

    fn filesystem(&self) -> Result<String, StorageError> {
        self.test_context.ctx.storage.filesystem_uuid()
    }

    async fn start(&self) {
        self.volumes().start(open());
        sleep(RETRY_LONGEST * 2).await;
    }

    /// Returns the events.
    async fn end(self) -> Vec<&'static str> {
        self.task.abort();
        drop(self.task.await);
        self.test_context.finish().await
    }
}

fn open() -> StorageState {
    StorageState::Open { filesystem_uuid: fixtures::FILESYSTEM.to_owned() }
}

async fn is_notified(signal: &Notify) -> bool {
    timeout(Duration::from_millis(1), signal.notified()).await.is_ok()
}

#[tokio::test(start_paused = true)]
async fn failing_and_usable_storage_is_reported() {
    let mount = || fake_store::error(ErrorKind::NotMounted, "mount it");
    let following = Following::begin(|volumes| volumes.break_with(mount())).await;
    assert_eq!(
        following.filesystem(),
        Err(StorageError::Unavailable("this node's storage is unavailable: mount it".to_owned()))
    );
    let before = following.generation();
    following.volumes().break_with(None);
    following.settle().await;
    assert_eq!(following.filesystem(), Ok(fixtures::FILESYSTEM.to_owned()));
    assert_eq!(following.generation(), before + 1);
    let ctx = &following.test_context.ctx;
    assert!(is_notified(&ctx.claims_deleted).await, "pending volumes are checked");
    following.volumes().break_with(mount());
    following.settle().await;
    following.volumes().break_with(None);
    following.settle().await;
    assert_eq!(following.generation(), before + 2);
    let expected = ["StorageUnavailable", "StorageReady", "StorageUnavailable", "StorageReady"];
    assert_eq!(following.end().await, expected);
}

#[tokio::test(start_paused = true)]
async fn node_without_any_storage_is_known() {
    let never = fake_store::error(ErrorKind::NeverMounted, "nothing is mounted there");
    let following = Following::begin(|volumes| volumes.break_with(never)).await;
    assert!(following.test_context.ctx.storage.is_absent());
    sleep(REPORT_INTERVAL).await;
    assert_eq!(following.end().await, ["StorageUnavailable"]);
}

#[tokio::test(start_paused = true)]
async fn a_long_outage_is_reported_again() {
    let mount = fake_store::error(ErrorKind::NotMounted, "mount it");
    let following = Following::begin(|volumes| volumes.break_with(mount)).await;
    sleep(REPORT_INTERVAL).await;
    following.volumes().break_with(None);
    sleep(2 * REPORT_INTERVAL).await;
    assert_eq!(following.end().await, ["StorageUnavailable", "StorageUnavailable", "StorageReady"]);
}

#[tokio::test(start_paused = true)]
async fn driver_restart_causes_no_event() {
    let following = Following::begin(|_| {}).await;
    let before = following.generation();
    following.volumes().stop();
    sleep(GRACE / 2).await;
    assert_eq!(following.filesystem(), Ok(fixtures::FILESYSTEM.to_owned()));
    following.volumes().start(StorageState::Untried);
    sleep(RETRY_LONGEST * 2).await;
    assert_eq!(following.filesystem(), Err(StorageError::Untried));
    following.start().await;
    assert_eq!(following.filesystem(), Ok(fixtures::FILESYSTEM.to_owned()));
    assert_eq!(following.generation(), before + 1);
    assert!(is_notified(&following.test_context.ctx.capacity).await);
    assert_eq!(following.end().await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn longer_driver_outage_is_reported() {
    let following = Following::begin(|_| {}).await;
    following.volumes().stop();
    sleep(GRACE * 3).await;
    assert_eq!(
        following.filesystem(),
        Err(StorageError::Unavailable(
            "this node's storage is unavailable: the driver does not run".to_owned()
        ))
    );
    following.start().await;
    assert_eq!(following.filesystem(), Ok(fixtures::FILESYSTEM.to_owned()));
    assert_eq!(following.end().await, ["StorageUnavailable", "StorageReady"]);
}

/// The disk may hang.
#[tokio::test(start_paused = true)]
async fn driver_without_open_storage_is_reported() {
    let following = Following::begin(|volumes| volumes.start(StorageState::Untried)).await;
    sleep(GRACE - Duration::from_secs(1)).await;
    assert_eq!(following.filesystem(), Err(StorageError::Untried));
    sleep(Duration::from_secs(2)).await;
    let error = following.filesystem().unwrap_err().to_string();
    assert!(error.contains("has not opened the storage yet; read its log"), "{error}");
    assert_eq!(following.end().await, ["StorageUnavailable"]);
}

#[tokio::test(start_paused = true)]
async fn each_number_has_its_effect() {
    let following = Following::begin(|_| {}).await;
    let ctx = &following.test_context.ctx;
    assert!(is_notified(&ctx.capacity).await && is_notified(&ctx.claims_deleted).await);
    let before = following.generation();

    following.volumes().count(fake_store::FakeStoreState::count_space);
    following.settle().await;
    assert!(is_notified(&ctx.capacity).await);
    assert_eq!(following.generation(), before);

    following.volumes().count(fake_store::FakeStoreState::count_freed);
    following.settle().await;
    assert!(!is_notified(&ctx.capacity).await);
    assert_eq!(following.generation(), before + 1);

    following.volumes().find(vec![ForeignFiles::default()]);
    following.settle().await;
    assert_eq!(following.generation(), before + 1);
    assert!(!is_notified(&ctx.claims_deleted).await);
    assert_eq!(following.end().await, ["FilesInForeignProject"]);
}

#[tokio::test(start_paused = true)]
async fn files_found_before_start_are_reported() {
    let following = Following::begin(|volumes| volumes.find(vec![ForeignFiles::default()])).await;
    assert_eq!(following.end().await, ["FilesInForeignProject"]);
}
