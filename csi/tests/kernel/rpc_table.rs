//! Every RPC in every situation: called first, again, by several at once, with hostile words, and when a driver was killed
//! while it was at it. What came of each is a table in the log.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

use csi::proto::csi as wire;
use loopfs::{Bytes, LoopControl, SnapshotId, VolumeKind, mountinfo};
use nix::sys::signal::Signal;
use tonic::{Code, Status};

use crate::calls_in_progress::hold_up;
use crate::driver_process::Process;
use crate::scene::{MIB, Scene, device_size, id, say};
use crate::support::*;

/// What a call is about.
#[derive(Clone)]
struct Subject {
    /// The name and id of its volume, and of its snapshot.
    name: String,
    target: PathBuf,
    staging: PathBuf,
}

impl Subject {
    fn new(scene: &Scene, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            target: scene.target(name),
            staging: scene.target(&format!("{name}-staging")),
        }
    }
}

/// An answer, in so far as it is the same each time.
type Answer = Result<String, Status>;

struct Rpc {
    name: &'static str,
    /// Brings the node to where the call has something to do.
    prepare: fn(&Scene, &Client, &Subject),
    call: fn(&Client, &Subject) -> Answer,
    /// Whether that is so for which it was called.
    is_done: fn(&Scene, &Subject) -> bool,
    hostile: Hostile,
}

/// What becomes of a call about something that has no such name.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Hostile {
    /// It names nothing.
    Nameless,
    Refused,
    /// There is no such thing, so it is gone, and lists are empty.
    Gone,
    /// Any text names a thing that is to be made.
    Made,
}

const WORDS: [&str; 6] = ["..", "../../outside", "a/b", ".hidden", "two\nlines", "nul\0"];

macro_rules! rpc {
    ($name:literal, $prepare:expr, $call:expr, $is_done:expr, $hostile:ident) => {
        Rpc { name: $name, prepare: $prepare, call: $call, is_done: $is_done, hostile: Hostile::$hostile }
    };
}

const RPCS: &[Rpc] = &[
    rpc!(
        "GetPluginInfo",
        nothing,
        |node, _| said(node.get_plugin_info(Default::default())),
        always,
        Nameless
    ),
    rpc!(
        "GetPluginCapabilities",
        nothing,
        |node, _| said(node.get_plugin_capabilities(Default::default())),
        always,
        Nameless
    ),
    rpc!("Probe", nothing, |node, _| said(node.probe(wire::ProbeRequest {})), always, Nameless),
    rpc!(
        "CreateVolume",
        nothing,
        |node, of| said(node.create_volume(create(&of.name, 1 << 20, block()))),
        is_stored,
        Made
    ),
    rpc!(
        "CreateVolume (clone)",
        |scene, _, of| scene.volume(&source(of), VolumeKind::Block),
        |node, of| said(node.create_volume(from_volume(&of.name, &source(of), 1 << 20, block()))),
        is_stored,
        Refused
    ),
    rpc!("DeleteVolume", device, |node, of| said(node.delete_volume(delete(&of.name))), is_gone, Gone),
    rpc!(
        "ControllerExpandVolume",
        device,
        |node, of| said(node.controller_expand_volume(grow(&of.name, 2 << 20, 0))),
        |scene, of| scene.store.volume(&id(&of.name)).unwrap().capacity() == Bytes(2 * MIB),
        Refused
    ),
    rpc!(
        "ControllerGetVolume",
        device,
        |node, of| said(node.controller_get_volume(get(&of.name))),
        is_stored,
        Refused
    ),
    rpc!(
        "ControllerGetVolumeHealth",
        device,
        |node, of| {
            let request =
                wire::ControllerGetVolumeHealthRequest { volume_id: of.name.clone(), ..Default::default() };
            said(node.controller_get_volume_health(request))
        },
        is_stored,
        Refused
    ),
    rpc!(
        "ControllerListVolumeHealth",
        nothing,
        |node, _| said(node.controller_list_volume_health(Default::default())),
        always,
        Nameless
    ),
    rpc!(
        "ValidateVolumeCapabilities",
        device,
        |node, of| said(node.validate_volume_capabilities(validate(&of.name, block()))),
        is_stored,
        Refused
    ),
    rpc!("ListVolumes", device, |node, _| said(node.list_volumes(list(0, ""))), is_stored, Nameless),
    rpc!(
        "GetCapacity",
        nothing,
        // It changes with what is freed in the background.
        |node, _| said(node.get_capacity(Default::default()).map(|answer| answer.available_capacity > 0)),
        always,
        Nameless
    ),
    rpc!(
        "ControllerGetCapabilities",
        nothing,
        |node, _| said(node.controller_get_capabilities(wire::ControllerGetCapabilitiesRequest {})),
        always,
        Nameless
    ),
    rpc!(
        "CreateSnapshot",
        device,
        |node, of| said(node.create_snapshot(create_snapshot(&of.name, &of.name))),
        is_kept,
        Refused
    ),
    rpc!(
        "DeleteSnapshot",
        snapshot,
        |node, of| said(node.delete_snapshot(delete_snapshot(&of.name))),
        |scene, of| !is_kept(scene, of),
        Gone
    ),
    rpc!(
        "GetSnapshot",
        snapshot,
        |node, of| said(node.get_snapshot(get_snapshot(&of.name))),
        is_kept,
        Refused
    ),
    rpc!(
        "ListSnapshots",
        snapshot,
        |node, of| said(node.list_snapshots(list_snapshots(0, "", &of.name, ""))),
        is_kept,
        Gone
    ),
    rpc!("NodeGetInfo", nothing, |node, _| said(node.node_get_info(Default::default())), always, Nameless),
    rpc!(
        "NodeGetCapabilities",
        nothing,
        |node, _| said(node.node_get_capabilities(Default::default())),
        always,
        Nameless
    ),
    rpc!(
        "NodeStageVolume",
        device,
        |node, of| said(node.node_stage_volume(stage(&of.name, &of.staging, block()))),
        is_attached,
        Refused
    ),
    rpc!(
        "NodePublishVolume",
        device,
        |node, of| said(node.node_publish_volume(publish(&of.name, &of.target, block()))),
        |scene, of| is_attached(scene, of) && is_shown(scene, of),
        Refused
    ),
    rpc!(
        "NodePublishVolume (mount)",
        directory,
        |node, of| said(node.node_publish_volume(publish(&of.name, &of.target, mount(&["nodev"])))),
        is_shown,
        Refused
    ),
    rpc!(
        "NodeGetVolumeStats",
        published,
        |node, of| said(node.node_get_volume_stats(stats(&of.name, &of.target))),
        is_shown,
        Refused
    ),
    rpc!(
        "NodeGetVolumeHealth",
        published,
        |node, of| {
            let target = of.target.to_str().unwrap_or_default().to_owned();
            let request = wire::NodeGetVolumeHealthRequest {
                volume_id: of.name.clone(),
                volume_publish_path: target,
                ..Default::default()
            };
            said(node.node_get_volume_health(request))
        },
        is_shown,
        Refused
    ),
    rpc!(
        "NodeGetStorageHealth",
        nothing,
        |node, _| said(node.node_get_storage_health(Default::default())),
        always,
        Nameless
    ),
    rpc!(
        "NodeExpandVolume",
        grown,
        |node, of| said(node.node_expand_volume(expand(&of.name, &of.target, 2 << 20, 0))),
        |_, of| device_size(&File::open(&of.target).unwrap()) == 2 * MIB,
        Refused
    ),
    rpc!(
        "NodeUnpublishVolume",
        published,
        |node, of| said(node.node_unpublish_volume(unpublish(&of.name, &of.target))),
        |scene, of| !is_attached(scene, of) && scene.mounts_at(&of.target) == 0 && !of.target.exists(),
        Refused
    ),
    rpc!(
        "NodeUnstageVolume",
        staged,
        |node, of| said(node.node_unstage_volume(unstage(&of.name, &of.staging))),
        |scene, of| !is_attached(scene, of),
        Refused
    ),
];

fn said<T: std::fmt::Debug>(answer: Result<T, Status>) -> Answer {
    answer.map(|answer| format!("{answer:?}"))
}

fn nothing(_: &Scene, _: &Client, _: &Subject) {}

fn device(scene: &Scene, _: &Client, of: &Subject) {
    scene.volume(&of.name, VolumeKind::Block);
}

fn directory(scene: &Scene, _: &Client, of: &Subject) {
    scene.volume(&of.name, VolumeKind::Filesystem);
}

fn source(of: &Subject) -> String {
    format!("{}-source", of.name)
}

fn snapshot(scene: &Scene, _: &Client, of: &Subject) {
    scene.volume(&of.name, VolumeKind::Block);
    scene.store.create_snapshot(&id(&of.name), &SnapshotId::parse(&of.name).unwrap()).unwrap();
}

fn staged(scene: &Scene, node: &Client, of: &Subject) {
    device(scene, node, of);
    node.node_stage_volume(stage(&of.name, &of.staging, block())).unwrap();
}

fn published(scene: &Scene, node: &Client, of: &Subject) {
    device(scene, node, of);
    node.node_publish_volume(publish(&of.name, &of.target, block())).unwrap();
}

fn grown(scene: &Scene, node: &Client, of: &Subject) {
    published(scene, node, of);
    scene.store.grow(&id(&of.name), Bytes(2 * MIB)).unwrap();
}

fn always(_: &Scene, _: &Subject) -> bool {
    true
}

fn is_stored(scene: &Scene, of: &Subject) -> bool {
    scene.store.list().unwrap().contains(&id(&of.name))
}

fn is_gone(scene: &Scene, of: &Subject) -> bool {
    !is_stored(scene, of)
}

fn is_kept(scene: &Scene, of: &Subject) -> bool {
    scene.store.snapshots().unwrap().iter().any(|snapshot| snapshot.as_str() == of.name)
}

fn is_attached(scene: &Scene, of: &Subject) -> bool {
    scene.devices(&of.name).len() == 1
}

fn is_shown(scene: &Scene, of: &Subject) -> bool {
    scene.mounts_at(&of.target) == 1
}

/// Takes away what a situation has shown or attached.
fn tidy(node: &Client, of: &Subject) {
    node.node_unpublish_volume(unpublish(&of.name, &of.target)).unwrap();
    node.node_unstage_volume(unstage(&of.name, &of.staging)).unwrap();
}

fn first_and_again(scene: &Scene, node: &Client, number: usize, rpc: &Rpc) -> [String; 2] {
    let of = Subject::new(scene, &format!("once-{number}"));
    (rpc.prepare)(scene, node, &of);
    let first = (rpc.call)(node, &of).unwrap_or_else(|status| panic!("{}: {status:?}", rpc.name));
    assert!((rpc.is_done)(scene, &of), "{}, called once", rpc.name);
    let again =
        (rpc.call)(node, &of).unwrap_or_else(|status| panic!("{}, called again: {status:?}", rpc.name));
    assert_eq!(again, first, "{}, called again", rpc.name);
    assert!((rpc.is_done)(scene, &of), "{}, called again", rpc.name);
    tidy(node, &of);
    ["OK".to_owned(), "the same".to_owned()]
}

fn at_once(scene: &Scene, node: &Client, number: usize, rpc: &Rpc) -> String {
    let of = Subject::new(scene, &format!("at-once-{number}"));
    (rpc.prepare)(scene, node, &of);
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| (rpc.call)(node, &of))).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    for status in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!(status.code(), Code::Aborted, "{}, called at once: {status:?}", rpc.name);
    }
    let done = answers.iter().filter(|answer| answer.is_ok()).count();
    assert!(done > 0, "{}, called at once: each waits for another", rpc.name);
    assert!((rpc.is_done)(scene, &of), "{}, called at once", rpc.name);
    tidy(node, &of);
    format!("{done} OK, {} Aborted", answers.len() - done)
}

/// What no call may reach: a directory beside the orchestrator's, and the way that was planted to it.
struct Outside {
    directory: PathBuf,
    way: PathBuf,
}

impl Outside {
    fn plant(scene: &Scene) -> Self {
        let outside = Self { directory: scene.scratch().join("outside"), way: scene.target("way") };
        fs::create_dir(&outside.directory).unwrap();
        fs::write(outside.directory.join("file"), "precious").unwrap();
        symlink(&outside.directory, &outside.way).unwrap();
        outside
    }

    fn paths(&self, scene: &Scene) -> [PathBuf; 4] {
        let up = scene.directories.kubelet.join("../outside/target");
        [self.directory.join("target"), up, self.way.join("target"), Path::new("target").to_owned()]
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

fn with_hostile_words(scene: &Scene, node: &Client, outside: &Outside, number: usize, rpc: &Rpc) -> String {
    if rpc.hostile == Hostile::Nameless {
        return "takes no name".to_owned();
    }
    let mut codes: Vec<Code> = Vec::new();
    let mut note = |answer: &Answer| {
        let code = answer.as_ref().err().map_or(Code::Ok, Status::code);
        codes.extend((!codes.contains(&code)).then_some(code));
        code
    };
    let held = || {
        let devices = LoopControl::open().unwrap().snapshot().unwrap().len();
        (scene.store.list().unwrap(), scene.store.snapshots().unwrap(), devices)
    };
    let before = held();
    for word in WORDS {
        let of = Subject { name: word.to_owned(), ..Subject::new(scene, "hostile") };
        let answer = (rpc.call)(node, &of);
        let allowed = match (rpc.hostile, note(&answer)) {
            (_, Code::InvalidArgument) => true,
            (Hostile::Refused, code) => code == Code::NotFound,
            (_, code) => code == Code::Ok,
        };
        assert!(allowed, "{} of {word:?}: {answer:?}", rpc.name);
        for volume in scene.store.list().unwrap().iter().filter(|volume| !before.0.contains(volume)) {
            assert!(rpc.hostile == Hostile::Made, "{} of {word:?} made {volume:?}", rpc.name);
            node.delete_volume(delete(volume.as_str())).unwrap();
        }
        outside.assert_untouched(rpc);
    }
    assert!(held() == before, "{} has changed something", rpc.name);

    if rpc.name.starts_with("Node") {
        let of = Subject::new(scene, &format!("astray-{number}"));
        (rpc.prepare)(scene, node, &of);
        for path in outside.paths(scene) {
            let astray = Subject { target: path.clone(), staging: path.clone(), ..of.clone() };
            let answer = (rpc.call)(node, &astray);
            let code = note(&answer);
            let refused = [Code::InvalidArgument, Code::FailedPrecondition, Code::NotFound].contains(&code);
            // The others go by the id: nothing is at a staging path, health is the volume's, and a device grows wherever it is shown.
            let at_path =
                ["NodePublish", "NodeUnpublish", "NodeGetVolumeStats"].map(|name| rpc.name.starts_with(name));
            let at_path = at_path.contains(&true);
            assert!(refused || !at_path, "{} at {}: {answer:?}", rpc.name, path.display());
            outside.assert_untouched(rpc);
        }
        tidy(node, &of);
    }
    codes.iter().map(|code| format!("{code:?}")).collect::<Vec<_>>().join(", ")
}

/// Calls all of them at once and kills the driver when most were answered and two are under way; answers what became of each.
fn cut_off(scene: &Scene, driver: Process, subjects: &[Subject]) -> Vec<Answer> {
    let node = driver.connect();
    let held: Vec<&Subject> = std::iter::zip(RPCS, subjects)
        .filter(|(rpc, _)| ["NodeStageVolume", "NodePublishVolume"].contains(&rpc.name))
        .map(|(_, of)| of)
        .collect();
    let locks: Vec<_> = held.iter().map(|of| hold_up(scene, &of.name)).collect();
    let (answered, answers) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let calls: Vec<_> = std::iter::zip(RPCS, subjects)
            .map(|(rpc, of)| {
                let (node, answered) = (&node, answered.clone());
                scope.spawn(move || {
                    let answer = until_free(|| (rpc.call)(node, of));
                    answered.send(()).unwrap();
                    answer
                })
            })
            .collect();
        for of in held {
            crate::calls_in_progress::wait_until_busy(&node, &of.name, &of.target);
        }
        answers.iter().take(RPCS.len() / 2).for_each(drop);
        driver.signal(Signal::SIGKILL);
        drop(locks);
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

fn until_free(call: impl Fn() -> Answer) -> Answer {
    let start = Instant::now();
    loop {
        match call() {
            Err(status) if status.code() == Code::Aborted && start.elapsed() < PATIENCE => {}
            answer => return answer,
        }
    }
}

#[test]
fn every_rpc_in_every_situation() {
    let scene = Scene::without_driver();
    let driver = Process::start(&scene.directories);
    let node = driver.connect();
    node.wait_until_ready();
    let outside = Outside::plant(&scene);
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (number, rpc) in RPCS.iter().enumerate() {
        let mut row = vec![rpc.name.to_owned()];
        row.extend(first_and_again(&scene, &node, number, rpc));
        row.push(at_once(&scene, &node, number, rpc));
        row.push(with_hostile_words(&scene, &node, &outside, number, rpc));
        rows.push(row);
    }

    let subjects: Vec<Subject> =
        (0..RPCS.len()).map(|number| Subject::new(&scene, &format!("cut-{number}"))).collect();
    for (rpc, of) in std::iter::zip(RPCS, &subjects) {
        (rpc.prepare)(&scene, &node, of);
    }
    drop(node);
    let cut = cut_off(&scene, driver, &subjects);
    assert!(cut.iter().filter(|answer| answer.is_err()).count() >= 2, "nothing was cut off: {cut:?}");
    let driver = Process::start(&scene.directories);
    let node = driver.connect();
    node.wait_until_ready();
    for (((rpc, of), cut), row) in std::iter::zip(RPCS, &subjects).zip(cut).zip(&mut rows) {
        let answer = (rpc.call)(&node, of);
        assert!(answer.is_ok(), "{}, after {cut:?} of a driver that was killed: {answer:?}", rpc.name);
        assert!((rpc.is_done)(&scene, of), "{}, after a driver was killed", rpc.name);
        row.push(if cut.is_ok() { "answered, OK" } else { "cut off, OK" }.to_owned());
        tidy(&node, of);
    }
    drop(node);
    assert!(driver.signal(Signal::SIGTERM).success());
    fs::remove_file(&outside.way).unwrap();
    fs::remove_dir_all(&outside.directory).unwrap();
    say(&format!("{:<28} {:<4} {:<9} {:<16} {:<13} hostile", "RPC", "once", "again", "at once", "killed"));
    for row in rows {
        let [name, first, again, at_once, hostile, killed] = &row[..] else { panic!("{row:?}") };
        say(&format!("{name:<28} {first:<4} {again:<9} {at_once:<16} {killed:<13} {hostile}"));
    }
    scene.finish();
}
