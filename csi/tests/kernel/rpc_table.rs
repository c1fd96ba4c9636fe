//! Test of every RPC in five situations: called once, repeated, called concurrently, called with malformed names and
//! paths, and called while the driver is killed. The results are printed as a table to the log.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

use csi::proto::csi as wire;
use loopfs::Bytes;
use loopfs::loop_device::LoopControl;
use loopfs::mount::table as mountinfo;
use loopfs::volume_store::{SnapshotId, VolumeKind};
use nix::sys::signal::Signal;
use tonic::{Code, Status};

use crate::calls_in_progress::lock_image;
use crate::driver_process::Process;
use crate::scene::{Fixture, MIB, device_size, id, write_log};
use crate::support::*;

/// The volume, snapshot and paths of one call.
#[derive(Clone)]
struct Subject {
    /// The name and id of its volume, and of its snapshot.
    name: String,
    target: PathBuf,
    staging: PathBuf,
}

impl Subject {
    fn new(fixture: &Fixture, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            target: fixture.target(name),
            staging: fixture.target(&format!("{name}-staging")),
        }
    }
}

/// The result of a call. It contains only the parts that are equal for repeated calls.
type CallResult = Result<String, Status>;

struct Rpc {
    name: &'static str,
    /// Creates the state that the call changes or reads.
    prepare: fn(&Fixture, &Client, &Subject),
    call: fn(&Client, &Subject) -> CallResult,
    /// Returns `true` if the node is in the state that the call establishes.
    is_done: fn(&Fixture, &Subject) -> bool,
    malformed_name: MalformedName,
}

/// The expected result of a call with a malformed name.
#[derive(Clone, Copy, Eq, PartialEq)]
enum MalformedName {
    /// The request contains no name.
    TakesNoName,
    Refused,
    /// No object can have this name, so deleting it succeeds and lists are empty.
    CountsAsDeleted,
    /// The name of a new object may be any text.
    Accepted,
}

const MALFORMED_NAMES: [&str; 6] = ["..", "../../outside", "a/b", ".hidden", "two\nlines", "nul\0"];

macro_rules! rpc {
    ($name:literal, $prepare:expr, $call:expr, $is_done:expr, $malformed_name:ident) => {
        Rpc {
            name: $name,
            prepare: $prepare,
            call: $call,
            is_done: $is_done,
            malformed_name: MalformedName::$malformed_name,
        }
    };
}

const RPCS: &[Rpc] = &[
    rpc!(
        "GetPluginInfo",
        nothing,
        |node, _| result_of(node.get_plugin_info(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "GetPluginCapabilities",
        nothing,
        |node, _| result_of(node.get_plugin_capabilities(Default::default())),
        always,
        TakesNoName
    ),
    rpc!("Probe", nothing, |node, _| result_of(node.probe(wire::ProbeRequest {})), always, TakesNoName),
    rpc!(
        "CreateVolume",
        nothing,
        |node, subject| result_of(node.create_volume(create(&subject.name, 1 << 20, block()))),
        is_stored,
        Accepted
    ),
    rpc!(
        "CreateVolume (clone)",
        |fixture, _, subject| fixture.volume(&source(subject), VolumeKind::Block),
        |node, subject| result_of(node.create_volume(from_volume(
            &subject.name,
            &source(subject),
            1 << 20,
            block()
        ))),
        is_stored,
        Refused
    ),
    rpc!(
        "DeleteVolume",
        device,
        |node, subject| result_of(node.delete_volume(delete(&subject.name))),
        is_deleted,
        CountsAsDeleted
    ),
    rpc!(
        "ControllerExpandVolume",
        device,
        |node, subject| result_of(node.controller_expand_volume(controller_expand(
            &subject.name,
            2 << 20,
            0
        ))),
        |fixture, subject| fixture.store.volume(&id(&subject.name)).unwrap().capacity() == Bytes(2 * MIB),
        Refused
    ),
    rpc!(
        "ControllerGetVolume",
        device,
        |node, subject| result_of(node.controller_get_volume(get(&subject.name))),
        is_stored,
        Refused
    ),
    rpc!(
        "ControllerGetVolumeHealth",
        device,
        |node, subject| {
            let request = wire::ControllerGetVolumeHealthRequest {
                volume_id: subject.name.clone(),
                ..Default::default()
            };
            result_of(node.controller_get_volume_health(request))
        },
        is_stored,
        Refused
    ),
    rpc!(
        "ControllerListVolumeHealth",
        nothing,
        |node, _| result_of(node.controller_list_volume_health(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "ValidateVolumeCapabilities",
        device,
        |node, subject| result_of(node.validate_volume_capabilities(validate(&subject.name, block()))),
        is_stored,
        Refused
    ),
    rpc!("ListVolumes", device, |node, _| result_of(node.list_volumes(list(0, ""))), is_stored, TakesNoName),
    rpc!(
        "GetCapacity",
        nothing,
        // The exact value changes while space is freed in the background.
        |node, _| result_of(
            node.get_capacity(Default::default()).map(|result| result.available_capacity > 0)
        ),
        always,
        TakesNoName
    ),
    rpc!(
        "ControllerGetCapabilities",
        nothing,
        |node, _| result_of(node.controller_get_capabilities(wire::ControllerGetCapabilitiesRequest {})),
        always,
        TakesNoName
    ),
    rpc!(
        "CreateSnapshot",
        device,
        |node, subject| result_of(node.create_snapshot(create_snapshot(&subject.name, &subject.name))),
        has_snapshot,
        Refused
    ),
    rpc!(
        "DeleteSnapshot",
        snapshot,
        |node, subject| result_of(node.delete_snapshot(delete_snapshot(&subject.name))),
        |fixture, subject| !has_snapshot(fixture, subject),
        CountsAsDeleted
    ),
    rpc!(
        "GetSnapshot",
        snapshot,
        |node, subject| result_of(node.get_snapshot(get_snapshot(&subject.name))),
        has_snapshot,
        Refused
    ),
    rpc!(
        "ListSnapshots",
        snapshot,
        |node, subject| result_of(node.list_snapshots(list_snapshots(0, "", &subject.name, ""))),
        has_snapshot,
        CountsAsDeleted
    ),
    rpc!(
        "NodeGetInfo",
        nothing,
        |node, _| result_of(node.node_get_info(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "NodeGetCapabilities",
        nothing,
        |node, _| result_of(node.node_get_capabilities(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "NodeStageVolume",
        device,
        |node, subject| result_of(node.node_stage_volume(stage(&subject.name, &subject.staging, block()))),
        is_attached,
        Refused
    ),
    rpc!(
        "NodePublishVolume",
        device,
        |node, subject| result_of(node.node_publish_volume(publish(&subject.name, &subject.target, block()))),
        |fixture, subject| is_attached(fixture, subject) && is_published(fixture, subject),
        Refused
    ),
    rpc!(
        "NodePublishVolume (mount)",
        directory,
        |node, subject| result_of(node.node_publish_volume(publish(
            &subject.name,
            &subject.target,
            mount(&["nodev"])
        ))),
        is_published,
        Refused
    ),
    rpc!(
        "NodeGetVolumeStats",
        published,
        |node, subject| result_of(node.node_get_volume_stats(stats(&subject.name, &subject.target))),
        is_published,
        Refused
    ),
    rpc!(
        "NodeGetVolumeHealth",
        published,
        |node, subject| {
            let target = subject.target.to_str().unwrap_or_default().to_owned();
            let request = wire::NodeGetVolumeHealthRequest {
                volume_id: subject.name.clone(),
                volume_publish_path: target,
                ..Default::default()
            };
            result_of(node.node_get_volume_health(request))
        },
        is_published,
        Refused
    ),
    rpc!(
        "NodeGetStorageHealth",
        nothing,
        |node, _| result_of(node.node_get_storage_health(Default::default())),
        always,
        TakesNoName
    ),
    rpc!(
        "NodeExpandVolume",
        expanded,
        |node, subject| result_of(node.node_expand_volume(expand(
            &subject.name,
            &subject.target,
            2 << 20,
            0
        ))),
        |_, subject| device_size(&File::open(&subject.target).unwrap()) == 2 * MIB,
        Refused
    ),
    rpc!(
        "NodeUnpublishVolume",
        published,
        |node, subject| result_of(node.node_unpublish_volume(unpublish(&subject.name, &subject.target))),
        |fixture, subject| !is_attached(fixture, subject)
            && fixture.mounts_at(&subject.target) == 0
            && !subject.target.exists(),
        Refused
    ),
    rpc!(
        "NodeUnstageVolume",
        staged,
        |node, subject| result_of(node.node_unstage_volume(unstage(&subject.name, &subject.staging))),
        |fixture, subject| !is_attached(fixture, subject),
        Refused
    ),
];

fn result_of<T: std::fmt::Debug>(result: Result<T, Status>) -> CallResult {
    result.map(|result| format!("{result:?}"))
}

fn nothing(_: &Fixture, _: &Client, _: &Subject) {}

fn device(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&subject.name, VolumeKind::Block);
}

fn directory(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&subject.name, VolumeKind::Filesystem);
}

fn source(subject: &Subject) -> String {
    format!("{}-source", subject.name)
}

fn snapshot(fixture: &Fixture, _: &Client, subject: &Subject) {
    fixture.volume(&subject.name, VolumeKind::Block);
    fixture.store.create_snapshot(&id(&subject.name), &SnapshotId::parse(&subject.name).unwrap()).unwrap();
}

fn staged(fixture: &Fixture, node: &Client, subject: &Subject) {
    device(fixture, node, subject);
    node.node_stage_volume(stage(&subject.name, &subject.staging, block())).unwrap();
}

fn published(fixture: &Fixture, node: &Client, subject: &Subject) {
    device(fixture, node, subject);
    node.node_publish_volume(publish(&subject.name, &subject.target, block())).unwrap();
}

fn expanded(fixture: &Fixture, node: &Client, subject: &Subject) {
    published(fixture, node, subject);
    fixture.store.expand(&id(&subject.name), Bytes(2 * MIB)).unwrap();
}

fn always(_: &Fixture, _: &Subject) -> bool {
    true
}

fn is_stored(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.store.list().unwrap().contains(&id(&subject.name))
}

fn is_deleted(fixture: &Fixture, subject: &Subject) -> bool {
    !is_stored(fixture, subject)
}

fn has_snapshot(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.store.snapshots().unwrap().iter().any(|snapshot| snapshot.as_str() == subject.name)
}

fn is_attached(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.devices(&subject.name).len() == 1
}

fn is_published(fixture: &Fixture, subject: &Subject) -> bool {
    fixture.mounts_at(&subject.target) == 1
}

/// Unpublishes and unstages the volume.
fn clean_up(node: &Client, subject: &Subject) {
    node.node_unpublish_volume(unpublish(&subject.name, &subject.target)).unwrap();
    node.node_unstage_volume(unstage(&subject.name, &subject.staging)).unwrap();
}

fn once_and_repeated(fixture: &Fixture, node: &Client, number: usize, rpc: &Rpc) -> [String; 2] {
    let subject = Subject::new(fixture, &format!("once-{number}"));
    (rpc.prepare)(fixture, node, &subject);
    let first = (rpc.call)(node, &subject).unwrap_or_else(|status| panic!("{}: {status:?}", rpc.name));
    assert!((rpc.is_done)(fixture, &subject), "{}, called once", rpc.name);
    let repeated =
        (rpc.call)(node, &subject).unwrap_or_else(|status| panic!("{}, repeated: {status:?}", rpc.name));
    assert_eq!(repeated, first, "{}, repeated", rpc.name);
    assert!((rpc.is_done)(fixture, &subject), "{}, repeated", rpc.name);
    clean_up(node, &subject);
    ["OK".to_owned(), "the same".to_owned()]
}

fn concurrently(fixture: &Fixture, node: &Client, number: usize, rpc: &Rpc) -> String {
    let subject = Subject::new(fixture, &format!("concurrent-{number}"));
    (rpc.prepare)(fixture, node, &subject);
    let results: Vec<CallResult> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| (rpc.call)(node, &subject))).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    for status in results.iter().filter_map(|result| result.as_ref().err()) {
        assert_eq!(status.code(), Code::Aborted, "{}, called concurrently: {status:?}", rpc.name);
    }
    let done = results.iter().filter(|result| result.is_ok()).count();
    assert!(done > 0, "{}, called concurrently: no call succeeds", rpc.name);
    assert!((rpc.is_done)(fixture, &subject), "{}, called concurrently", rpc.name);
    clean_up(node, &subject);
    format!("{done} OK, {} Aborted", results.len() - done)
}

/// A directory beside the kubelet directory, which no call may reach, and a symbolic link to it.
struct Outside {
    directory: PathBuf,
    symlink_path: PathBuf,
}

impl Outside {
    fn create(fixture: &Fixture) -> Self {
        let outside =
            Self { directory: fixture.scratch().join("outside"), symlink_path: fixture.target("way") };
        fs::create_dir(&outside.directory).unwrap();
        fs::write(outside.directory.join("file"), "precious").unwrap();
        symlink(&outside.directory, &outside.symlink_path).unwrap();
        outside
    }

    fn paths(&self, fixture: &Fixture) -> [PathBuf; 4] {
        let up = fixture.directories.kubelet.join("../outside/target");
        [self.directory.join("target"), up, self.symlink_path.join("target"), Path::new("target").to_owned()]
    }

    fn assert_untouched(&self, rpc: &Rpc) {
        let names: Vec<_> =
            fs::read_dir(&self.directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"], "{}", rpc.name);
        assert_eq!(fs::read_to_string(self.directory.join("file")).unwrap(), "precious", "{}", rpc.name);
        let mounts = mountinfo::read().unwrap();
        assert!(
            !mounts.iter().any(|mount| mount.mount_point.starts_with(&self.directory)),
            "{}: {mounts:?}",
            rpc.name
        );
    }
}

fn with_malformed_names(
    fixture: &Fixture,
    node: &Client,
    outside: &Outside,
    number: usize,
    rpc: &Rpc,
) -> String {
    if rpc.malformed_name == MalformedName::TakesNoName {
        return "takes no name".to_owned();
    }
    let mut codes: Vec<Code> = Vec::new();
    let mut note = |result: &CallResult| {
        let code = result.as_ref().err().map_or(Code::Ok, Status::code);
        codes.extend((!codes.contains(&code)).then_some(code));
        code
    };
    let locked = || {
        let devices = LoopControl::open().unwrap().list().unwrap().len();
        (fixture.store.list().unwrap(), fixture.store.snapshots().unwrap(), devices)
    };
    let before = locked();
    for name in MALFORMED_NAMES {
        let subject = Subject { name: name.to_owned(), ..Subject::new(fixture, "malformed") };
        let result = (rpc.call)(node, &subject);
        let allowed = match (rpc.malformed_name, note(&result)) {
            (_, Code::InvalidArgument) => true,
            (MalformedName::Refused, code) => code == Code::NotFound,
            (_, code) => code == Code::Ok,
        };
        assert!(allowed, "{} of {name:?}: {result:?}", rpc.name);
        for volume in fixture.store.list().unwrap().iter().filter(|volume| !before.0.contains(volume)) {
            assert!(
                rpc.malformed_name == MalformedName::Accepted,
                "{} of {name:?} created {volume:?}",
                rpc.name
            );
            node.delete_volume(delete(volume.as_str())).unwrap();
        }
        outside.assert_untouched(rpc);
    }
    assert!(locked() == before, "{} has changed the state of the node", rpc.name);

    if rpc.name.starts_with("Node") {
        let subject = Subject::new(fixture, &format!("outside-{number}"));
        (rpc.prepare)(fixture, node, &subject);
        for path in outside.paths(fixture) {
            let outside_path = Subject { target: path.clone(), staging: path.clone(), ..subject.clone() };
            let result = (rpc.call)(node, &outside_path);
            let code = note(&result);
            let refused = [Code::InvalidArgument, Code::FailedPrecondition, Code::NotFound].contains(&code);
            // The other calls use only the id: staging leaves nothing at its path, health is a property of the volume, and a
            // device is refreshed wherever it is published.
            let at_path =
                ["NodePublish", "NodeUnpublish", "NodeGetVolumeStats"].map(|name| rpc.name.starts_with(name));
            let at_path = at_path.contains(&true);
            assert!(refused || !at_path, "{} at {}: {result:?}", rpc.name, path.display());
            outside.assert_untouched(rpc);
        }
        clean_up(node, &subject);
    }
    codes.iter().map(|code| format!("{code:?}")).collect::<Vec<_>>().join(", ")
}

/// Starts all calls concurrently, and kills the driver when half of them have returned and two are in progress. Returns the
/// result of each call.
fn kill_during_calls(fixture: &Fixture, driver: Process, subjects: &[Subject]) -> Vec<CallResult> {
    let node = driver.connect();
    let locked: Vec<&Subject> = std::iter::zip(RPCS, subjects)
        .filter(|(rpc, _)| ["NodeStageVolume", "NodePublishVolume"].contains(&rpc.name))
        .map(|(_, subject)| subject)
        .collect();
    let locks: Vec<_> = locked.iter().map(|subject| lock_image(fixture, &subject.name)).collect();
    let (returned, results) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let calls: Vec<_> = std::iter::zip(RPCS, subjects)
            .map(|(rpc, subject)| {
                let (node, returned) = (&node, returned.clone());
                scope.spawn(move || {
                    let result = until_free(|| (rpc.call)(node, subject));
                    returned.send(()).unwrap();
                    result
                })
            })
            .collect();
        for subject in locked {
            crate::calls_in_progress::wait_until_busy(&node, &subject.name, &subject.target);
        }
        results.iter().take(RPCS.len() / 2).for_each(drop);
        driver.signal(Signal::SIGKILL);
        drop(locks);
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

fn until_free(call: impl Fn() -> CallResult) -> CallResult {
    let start = Instant::now();
    loop {
        match call() {
            Err(status) if status.code() == Code::Aborted && start.elapsed() < TIMEOUT => {}
            result => return result,
        }
    }
}

#[test]
fn every_rpc_is_idempotent_safe_concurrently_and_after_a_crash() {
    let fixture = Fixture::without_driver();
    let driver = Process::start(&fixture.directories);
    let node = driver.connect();
    node.wait_until_ready();
    let outside = Outside::create(&fixture);
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (number, rpc) in RPCS.iter().enumerate() {
        let mut row = vec![rpc.name.to_owned()];
        row.extend(once_and_repeated(&fixture, &node, number, rpc));
        row.push(concurrently(&fixture, &node, number, rpc));
        row.push(with_malformed_names(&fixture, &node, &outside, number, rpc));
        rows.push(row);
    }

    let subjects: Vec<Subject> =
        (0..RPCS.len()).map(|number| Subject::new(&fixture, &format!("killed-{number}"))).collect();
    for (rpc, subject) in std::iter::zip(RPCS, &subjects) {
        (rpc.prepare)(&fixture, &node, subject);
    }
    drop(node);
    let interrupted = kill_during_calls(&fixture, driver, &subjects);
    assert!(
        interrupted.iter().filter(|result| result.is_err()).count() >= 2,
        "no call was interrupted: {interrupted:?}"
    );
    let driver = Process::start(&fixture.directories);
    let node = driver.connect();
    node.wait_until_ready();
    for (((rpc, subject), interrupted), row) in
        std::iter::zip(RPCS, &subjects).zip(interrupted).zip(&mut rows)
    {
        let result = (rpc.call)(&node, subject);
        assert!(
            result.is_ok(),
            "{}, repeated after {interrupted:?} of a killed driver: {result:?}",
            rpc.name
        );
        assert!((rpc.is_done)(&fixture, subject), "{}, repeated after the driver was killed", rpc.name);
        row.push(if interrupted.is_ok() { "returned, OK" } else { "interrupted, OK" }.to_owned());
        clean_up(&node, subject);
    }
    drop(node);
    assert!(driver.signal(Signal::SIGTERM).success());
    fs::remove_file(&outside.symlink_path).unwrap();
    fs::remove_dir_all(&outside.directory).unwrap();
    write_log(&format!(
        "{:<28} {:<4} {:<9} {:<16} {:<15} malformed",
        "RPC", "once", "repeated", "concurrently", "killed"
    ));
    for row in rows {
        let [name, first, repeated, concurrent, malformed, killed] = &row[..] else { panic!("{row:?}") };
        write_log(&format!("{name:<28} {first:<4} {repeated:<9} {concurrent:<16} {killed:<15} {malformed}"));
    }
    fixture.finish();
}
