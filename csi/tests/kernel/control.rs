//! Tests of the control socket, on which the provisioner and csi-snapshotter call.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Instant;

use csi_wire::csi as wire;
use csi_wire::csi::controller_client::ControllerClient;
use csi_wire::csi::node_client::NodeClient;
use csi_wire::reason::Reason;
use csi_wire::volumes::create_request::Source;
use csi_wire::volumes::node_state::Storage;
use csi_wire::volumes::volumes_client::VolumesClient;
use csi_wire::volumes::{self, Kind};
use loopfs::project_quota::ProjectId;
use loopfs::project_tree::{HardLinks, tag_tree};
use loopfs::volume_store::{VolumeKind, VolumeSpec};
use loopfs::{Bytes, ErrorKind};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::statfs;
use rstest::rstest;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::calls_in_progress::{until_free, wait_until_busy};
use crate::fixture::{Fixture, MIB, device_size, id, write_to};
use crate::support::*;

const OTHER_DISK: &str = "00000000-0000-4000-8000-000000000000";

/// A node with a driver that has a control socket, and a client of that.
struct Node {
    fixture: Fixture,
    runtime: Runtime,
    channel: Channel,
}

impl Node {
    fn new() -> Self {
        Self::with(&[])
    }

    /// Returns a node whose driver has these further options.
    fn with(options: &[&str]) -> Self {
        let mut fixture = Fixture::without_driver();
        let control = format!("--control-endpoint=unix://{}", fixture.control_socket().display());
        fixture.directories.more.push(control);
        fixture.directories.more.extend(options.iter().map(|option| (*option).to_owned()));
        fixture.start_driver();
        Self::of(fixture)
    }

    /// Returns the node of a fixture whose driver has a control socket.
    fn of(fixture: Fixture) -> Self {
        let runtime = Runtime::new().unwrap();
        let endpoint = Endpoint::try_from(format!("unix://{}", fixture.control_socket().display())).unwrap();
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self { fixture, runtime, channel }
    }

    fn volumes(&self) -> VolumesClient<Channel> {
        VolumesClient::new(self.channel.clone())
    }

    fn create(&self, request: volumes::CreateRequest) -> Result<volumes::CreateResponse, Status> {
        Ok(self.runtime.block_on(self.volumes().create(request))?.into_inner())
    }

    fn expand(&self, name: &str, capacity: u64, on: &str) -> Result<volumes::ExpandResponse, Status> {
        let filesystem_uuid = on.to_owned();
        let request = volumes::ExpandRequest { volume_id: name.to_owned(), capacity, filesystem_uuid };
        Ok(self.runtime.block_on(self.volumes().expand(request))?.into_inner())
    }

    fn delete(&self, name: &str, on: &str) -> Result<bool, Status> {
        let request = volumes::DeleteRequest { volume_id: name.to_owned(), filesystem_uuid: on.to_owned() };
        Ok(self.runtime.block_on(self.volumes().delete(request))?.into_inner().existed)
    }

    fn confirm(&self, name: &str, on: &str) -> Result<(), Status> {
        let filesystem_uuid = on.to_owned();
        let request = volumes::ConfirmRequest { volume_id: name.to_owned(), filesystem_uuid };
        self.runtime.block_on(self.volumes().confirm(request)).map(drop)
    }

    /// Returns the file system and the volumes.
    fn list(&self, only_pending: bool) -> (String, Vec<volumes::Volume>) {
        self.runtime.block_on(async {
            let pages = self.volumes().list(volumes::ListRequest { only_pending }).await;
            let mut pages = pages.unwrap().into_inner();
            let (mut filesystem, mut listed) = (String::new(), Vec::new());
            while let Some(page) = pages.message().await.unwrap() {
                filesystem = page.filesystem_uuid;
                listed.extend(page.volumes);
            }
            listed.sort_by(|a, b| a.volume_id.cmp(&b.volume_id));
            (filesystem, listed)
        })
    }

    /// Watches the node until a state is as expected.
    fn until(&self, is_expected: impl Fn(&volumes::NodeState) -> bool) -> volumes::NodeState {
        let watching = async {
            let mut states = self.volumes().watch(volumes::WatchRequest {}).await.unwrap().into_inner();
            loop {
                let state = states.message().await.unwrap().expect("the driver runs");
                if is_expected(&state) {
                    return state;
                }
            }
        };
        self.runtime
            .block_on(async { tokio::time::timeout(TIMEOUT, watching).await.expect("a state in time") })
    }

    /// Returns the number of entries in a directory of the store.
    fn entries(&self, directory: &str) -> usize {
        fs::read_dir(self.fixture.directories.data.join(directory)).unwrap().count()
    }

    fn disconnect(self) -> Fixture {
        let Self { fixture, runtime, channel } = self;
        drop((channel, runtime));
        fixture
    }

    fn finish(self) {
        self.disconnect().finish();
    }
}

fn new_volume(name: &str, kind: Kind) -> volumes::CreateRequest {
    let annotations = [("claim", "shop/data"), ("uid", "u")];
    volumes::CreateRequest {
        volume_id: name.to_owned(),
        kind: kind.into(),
        capacity: MIB,
        settings: HashMap::new(),
        annotations: annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        source: None,
    }
}

fn reason<T: std::fmt::Debug>(outcome: Result<T, Status>) -> Reason {
    Reason::of(&outcome.unwrap_err()).expect("the driver gives a reason")
}

#[rstest]
#[case(Kind::Filesystem)]
#[case(Kind::Block)]
fn the_volume_of_a_claim(#[case] kind: Kind) {
    let node = Node::new();
    let uuid = node.fixture.store.filesystem_uuid().to_string();
    let request = new_volume("pvc-1", kind);
    for _ in 0..2 {
        let created = node.create(request.clone()).unwrap();
        let expected =
            volumes::CreateResponse { capacity: MIB, filesystem_uuid: uuid.clone(), held_data: false };
        assert_eq!(created, expected);
        let volume = volumes::Volume {
            volume_id: "pvc-1".to_owned(),
            pending: true,
            annotations: request.annotations.clone(),
        };
        for only_pending in [true, false] {
            assert_eq!(node.list(only_pending), (uuid.clone(), vec![volume.clone()]));
        }
    }
    for _ in 0..2 {
        node.confirm("pvc-1", &uuid).unwrap();
        assert_eq!(node.list(true), (uuid.clone(), vec![]));
        assert!(!node.list(false).1[0].pending);
    }
    node.confirm("pvc-2", "").unwrap();

    let target = node.fixture.target("target");
    let capability = if kind == Kind::Block { block() } else { mount(&[]) };
    node.fixture.node().node_publish_volume(publish("pvc-1", &target, capability)).unwrap();
    for on in ["", &uuid] {
        let expanded = node.expand("pvc-1", 3 * MIB, on).unwrap();
        assert_eq!(expanded, volumes::ExpandResponse { capacity: 3 * MIB, devices_refreshed: true });
    }
    match kind {
        Kind::Block => {
            assert_eq!(device_size(&File::open(&target).unwrap()), 3 * MIB);
            write_to(&target, b"data").unwrap();
        }
        Kind::Filesystem => {
            let file_system = statfs(&target).unwrap();
            assert_eq!(file_system.blocks() * u64::try_from(file_system.block_size()).unwrap(), 3 * MIB);
            fs::write(target.join("file"), b"data").unwrap();
        }
    }
    assert_eq!(reason(node.delete("pvc-1", "")), Reason::Store(ErrorKind::Conflict));
    node.fixture.node().node_unpublish_volume(unpublish("pvc-1", &target)).unwrap();

    // The class was replaced by another one in the meantime.
    let settings = [("bytesPerInode".to_owned(), "4096".to_owned())].into();
    let again = node.create(volumes::CreateRequest { settings, ..request }).unwrap();
    assert_eq!((again.capacity, again.held_data), (3 * MIB, true));

    assert!(node.delete("pvc-1", &uuid).unwrap());
    assert!(!node.delete("pvc-1", &uuid).unwrap());
    node.finish();
}

#[test]
fn volumes_on_another_disk_stay_unchanged() {
    let node = Node::new();
    node.create(new_volume("pvc-1", Kind::Filesystem)).unwrap();
    let present = Reason::OtherFilesystem(node.fixture.store.filesystem_uuid());
    assert_eq!(reason(node.confirm("pvc-1", OTHER_DISK)), present);
    assert_eq!(node.list(true).1.len(), 1);
    assert_eq!(reason(node.expand("pvc-1", 2 * MIB, OTHER_DISK)), present);
    assert_eq!(reason(node.delete("pvc-1", OTHER_DISK)), present);
    assert_eq!(node.fixture.store.volume(&id("pvc-1")).unwrap().capacity(), Bytes(MIB));
    node.finish();
}

#[test]
fn malformed_requests_are_refused_with_reason() {
    let node = Node::new();
    let invalid = Reason::Store(ErrorKind::InvalidInput);
    for name in ["", ".", "../volumes", "a/b", "\0", &"v".repeat(300)] {
        assert_eq!(reason(node.create(new_volume(name, Kind::Block))), invalid);
        assert_eq!(reason(node.expand(name, MIB, "")), invalid);
        assert_eq!(reason(node.delete(name, "")), invalid);
        assert_eq!(reason(node.confirm(name, "")), invalid);
    }
    for node_uid in ["", "a b", "ü", "\n", &"u".repeat(65)].map(ToOwned::to_owned) {
        let request = volumes::TakeCustodyRequest { node_uid };
        assert_eq!(reason(node.runtime.block_on(node.volumes().take_custody(request))), invalid);
    }
    assert_eq!(reason(node.delete("pvc-1", "not a UUID")), invalid);
    let settings = [("no-such-setting".to_owned(), String::new())].into();
    let annotations = [("a key".to_owned(), String::new())].into();
    let valid = new_volume("pvc-1", Kind::Block);
    for request in [
        volumes::CreateRequest { settings, ..valid.clone() },
        volumes::CreateRequest { annotations, ..valid.clone() },
        volumes::CreateRequest { source: Some(Source::Volume("../a".to_owned())), ..valid.clone() },
        volumes::CreateRequest { capacity: 0, ..valid.clone() },
    ] {
        assert_eq!(reason(node.create(request)), invalid);
    }
    let huge = volumes::CreateRequest { capacity: u64::MAX, ..valid.clone() };
    assert!(matches!(reason(node.create(huge)), Reason::Store(ErrorKind::InvalidInput | ErrorKind::NoSpace)));
    let too_large = volumes::CreateRequest { capacity: 1 << 50, ..valid.clone() };
    assert_eq!(reason(node.create(too_large)), Reason::Store(ErrorKind::NoSpace));
    let absent = volumes::CreateRequest { source: Some(Source::Volume("pvc-2".to_owned())), ..valid };
    assert_eq!(reason(node.create(absent)), Reason::Store(ErrorKind::NotFound));
    assert_eq!(reason(node.expand("pvc-1", MIB, "")), Reason::Store(ErrorKind::NotFound));
    assert_eq!(node.list(false).1, []);
    node.finish();
}

/// A process with credentials could otherwise mount any volume into any pod of the node.
/// Only its group can connect to it.
#[test]
fn control_socket_refuses_node_calls() {
    let node = Node::new();
    let mut client = NodeClient::new(node.channel.clone());
    let target = node.fixture.target("target");
    let published = node.runtime.block_on(client.node_publish_volume(publish("v", &target, block())));
    assert_eq!(published.unwrap_err().code(), Code::Unimplemented);
    let info = node.runtime.block_on(client.node_get_info(wire::NodeGetInfoRequest {}));
    assert_eq!(info.unwrap_err().code(), Code::Unimplemented);

    let mode = |path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(node.fixture.control_socket()), 0o660);
    assert_eq!(mode(node.fixture.directories.endpoint.clone()), 0o600);
    let volumes = node.runtime.block_on(async {
        let endpoint = format!("unix://{}", node.fixture.directories.endpoint.display());
        let channel = Endpoint::try_from(endpoint).unwrap().connect().await.unwrap();
        VolumesClient::new(channel).list(volumes::ListRequest { only_pending: true }).await.map(drop)
    });
    assert_eq!(volumes.unwrap_err().code(), Code::Unimplemented, "the kubelet's socket has no such service");
    node.finish();
}

#[test]
fn socket_inherits_group_of_its_directory() {
    const GROUP: u32 = 65534;
    let mut fixture = Fixture::without_driver();
    let directory = fixture.scratch().join("control");
    fs::create_dir(&directory).unwrap();
    std::os::unix::fs::chown(&directory, None, Some(GROUP)).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o2770)).unwrap();
    let socket = directory.join("control.sock");
    fixture.directories.more.push(format!("--control-endpoint=unix://{}", socket.display()));
    fixture.start_driver();
    assert_eq!(fs::symlink_metadata(&socket).unwrap().gid(), GROUP);
    fixture.finish();
}

#[test]
fn a_watch_reports_changes() {
    let node = Node::new();
    let uuid = node.fixture.store.filesystem_uuid().to_string();
    // After the cleanup at its start, which is a change too.
    let first = node.until(|state| state.storage() == Storage::Available && state.freed > 0);
    assert_eq!((first.filesystem_uuid, first.reason.as_str()), (uuid, ""));
    node.create(new_volume("pvc-1", Kind::Filesystem)).unwrap();
    let created = node.until(|state| state.space > first.space);
    node.fixture.node().create_snapshot(create_snapshot("s", "pvc-1")).unwrap();
    let copied = node.until(|state| state.space > created.space);
    assert!(node.delete("pvc-1", "").unwrap());
    node.until(|state| state.space > copied.space && state.freed > copied.freed);
    node.finish();
}

#[test]
fn watch_reports_a_hanging_disk() {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    let node = Node::of(fixture);
    node.until(|state| state.storage() == Storage::Available);
    let root = File::open(&disk.data).unwrap();
    loopfs::fault_injection::freeze(&root).unwrap();
    let hanging = node.until(|state| state.storage() == Storage::Unavailable);
    loopfs::fault_injection::thaw(&root).unwrap();
    assert!(hanging.reason.contains("has not ended"), "{}", hanging.reason);
    node.until(|state| state.storage() == Storage::Available);
    drop(root);
    let fixture = node.disconnect();
    driver.stop();
    drop(disk);
    fixture.finish();
}

#[test]
fn foreign_files_are_found_and_repaired() {
    let node = Node::with(&["--search-projects", "--repair-projects", "--check-interval=1"]);
    node.create(new_volume("pvc-1", Kind::Filesystem)).unwrap();
    let directory = node.fixture.directories.data.join("volumes/pvc-1/charged");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("file"), b"data").unwrap();
    let foreign = ProjectId::new(77).unwrap();
    tag_tree(File::open(&directory).unwrap(), foreign, HardLinks::Skip, |_| {}).unwrap();
    node.until(|state| state.foreign_files > 0);
    let found = node.runtime.block_on(async {
        let found = node.volumes().list_foreign_files(volumes::ListForeignFilesRequest {}).await.unwrap();
        found.into_inner().message().await.unwrap().expect("there are findings")
    });
    let names = (found.volume_id.as_str(), found.charged_volume_id.as_str(), found.names);
    assert_eq!(names, ("pvc-1", "", 2));
    assert!(found.example.starts_with("\"charged"), "{}", found.example);
    assert_eq!(found.repaired, Some(2));
    node.finish();
}

/// A call that copies.
type Copying = JoinHandle<Result<(), Status>>;

/// Enough for the inodes of the files.
const CAPACITY: u64 = 128 * MIB;

/// Returns a node with the volume `pvc-1`, whose copy takes a while.
fn node_with_many_files() -> Node {
    // The copy asks at every 1024th name whether it is still wanted, and the end of the call must arrive while it copies.
    const FILES: usize = 6000;
    let node = Node::new();
    let spec = VolumeSpec::new(VolumeKind::Filesystem, Bytes(CAPACITY));
    node.fixture.store.create(&id("pvc-1"), &spec).unwrap();
    let source = node.fixture.directories.data.join("volumes/pvc-1");
    for number in 0..FILES {
        File::create(source.join(number.to_string())).unwrap();
    }
    node
}

/// Makes the call, and returns it when the copy has begun.
fn begin(node: &Node, call: impl Future<Output = Result<(), Status>> + Send + 'static) -> Copying {
    let copying = node.runtime.spawn(call);
    let start = Instant::now();
    while node.entries("staging") == 0 {
        assert!(start.elapsed() < TIMEOUT, "the copy does not begin");
        if copying.is_finished() {
            panic!("the copy has ended: {:?}", node.runtime.block_on(copying));
        }
        std::thread::yield_now();
    }
    copying
}

fn begin_clone(node: &Node) -> Copying {
    let request = volumes::CreateRequest {
        source: Some(Source::Volume("pvc-1".to_owned())),
        capacity: CAPACITY,
        ..new_volume("pvc-2", Kind::Filesystem)
    };
    let mut client = node.volumes();
    begin(node, async move { client.create(request).await.map(drop) })
}

fn begin_snapshot(node: &Node) -> Copying {
    let mut client = ControllerClient::new(node.channel.clone());
    begin(node, async move { client.create_snapshot(create_snapshot("s", "pvc-1")).await.map(drop) })
}

fn assert_no_copy(fixture: &Fixture) {
    assert_eq!(fixture.store.list().unwrap(), [id("pvc-1")]);
    assert_eq!(fixture.store.snapshots().unwrap(), []);
}

#[test]
fn a_copy_ends_with_its_call() {
    let node = node_with_many_files();
    for begin in [begin_clone, begin_snapshot] {
        begin(&node).abort();
        wait_until("the copied files are removed", || node.entries("staging") + node.entries("trash") == 0);
        assert_no_copy(&node.fixture);
    }
    node.finish();
}

#[test]
fn a_copy_ends_with_its_driver() {
    let mut node = node_with_many_files();
    for begin in [begin_clone, begin_snapshot] {
        let copying = begin(&node);
        node.fixture.begin_to_stop();
        let ended = node.runtime.block_on(copying).unwrap();
        // INTERNAL would be final for csi-snapshotter.
        assert_eq!(ended.unwrap_err().code(), Code::Aborted);
        let mut fixture = node.disconnect();
        fixture.stop_driver();
        assert_no_copy(&fixture);
        fixture.start_driver();
        node = Node::of(fixture);
    }
    node.finish();
}

/// The volume may have been retained since its client gave up.
#[test]
fn delete_ends_with_its_call() {
    let node = Node::new();
    node.create(new_volume("pvc-1", Kind::Filesystem)).unwrap();
    let lock = File::open(node.fixture.directories.data.join(".loopfs/lock")).unwrap();
    let lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_file, errno)| errno).unwrap();
    let request = volumes::DeleteRequest { volume_id: "pvc-1".to_owned(), filesystem_uuid: String::new() };
    let mut client = node.volumes();
    let deletion = node.runtime.spawn(async move {
        loop {
            match client.delete(request.clone()).await {
                // The test looks whether the volume is locked, and locks it for that.
                Err(status) if status.code() == Code::Aborted => {}
                ended => break ended,
            }
        }
    });
    wait_until_busy(node.fixture.node(), "pvc-1", &node.fixture.target("target"));
    deletion.abort();
    let ended = node.runtime.block_on(deletion).map(drop);
    assert!(ended.unwrap_err().is_cancelled(), "the deletion does not wait for the lock of the store");
    // The driver has received the end of that call before it receives later calls of the same connection.
    for _ in 0..3 {
        assert_eq!(node.list(false).1.len(), 1);
    }
    drop(lock);
    // The volume is locked until the work of the call has ended.
    let expanded = until_free(|| node.expand("pvc-1", 2 * MIB, ""));
    assert_eq!(expanded.unwrap().capacity, 2 * MIB);
    assert!(node.delete("pvc-1", "").unwrap());
    node.finish();
}

/// The record is a file next to the data directory.
#[test]
fn custody_lists_previously_existing_volumes() {
    let node = Node::new();
    let take = |uid: &str| {
        let request = volumes::TakeCustodyRequest { node_uid: uid.to_owned() };
        node.runtime.block_on(node.volumes().take_custody(request)).unwrap().into_inner()
    };
    let uuid = node.fixture.store.filesystem_uuid().to_string();
    let custody = |found: &[&str]| volumes::TakeCustodyResponse {
        filesystem_uuid: uuid.clone(),
        found: found.iter().map(|id| (*id).to_owned()).collect(),
    };
    node.create(new_volume("pvc-1", Kind::Filesystem)).unwrap();
    assert_eq!(take("first"), custody(&["pvc-1"]), "it is unknown whose volumes these are");
    node.create(new_volume("pvc-2", Kind::Filesystem)).unwrap();
    assert_eq!(take("first"), custody(&["pvc-1"]));
    assert_eq!(take("second"), custody(&["pvc-1", "pvc-2"]), "the node was registered again");
    fs::remove_file(node.fixture.directories.data.with_extension("custody")).unwrap();
    node.finish();
}

#[test]
fn capacity_equals_largest_creatable_volume() {
    let node = Node::new();
    let request = volumes::CapacityRequest { settings: HashMap::new() };
    let capacity = node.runtime.block_on(node.volumes().capacity(request)).unwrap().into_inner();
    assert!(0 < capacity.largest_volume && capacity.largest_volume <= capacity.available, "{capacity:?}");
    let largest =
        volumes::CreateRequest { capacity: capacity.largest_volume, ..new_volume("pvc-1", Kind::Block) };
    assert_eq!(node.create(largest).unwrap().capacity, capacity.largest_volume);
    node.finish();
}
