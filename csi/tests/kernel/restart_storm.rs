//! Test of a driver that is killed repeatedly while it serves calls.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use csi::proto::csi as wire;
use loopfs::Bytes;
use loopfs::loop_device::LoopControl;
use loopfs::mount::table as mountinfo;
use loopfs::volume_store::VolumeKind;
use nix::sys::signal::Signal;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::driver_process::Process;
use crate::fixture::{Fixture, MIB, id, read_from, write_log, write_to};
use crate::support::*;

const VOLUMES: usize = 200;
const KILLS: usize = 50;
const CALLERS: usize = 4;
/// The maximum number of calls that a process serves before it is killed. With this number, on any machine some
/// processes are killed at their start and most while they serve calls.
const MAX_CALLS_BEFORE_KILL: u64 = 12;
/// The maximum time between the last of these calls and the kill, so that the kill interrupts a call.
const MAX_KILL_DELAY: Duration = Duration::from_millis(20);
const STEP: u64 = 4096;
const MAX_SIZE: u64 = 2 * MIB;

/// SplitMix64, a random generator whose sequence can be repeated.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// Returns the seed from `LOOPFS_TEST_SEED`, or from the time.
fn seed() -> u64 {
    let given = std::env::var("LOOPFS_TEST_SEED").ok().map(|text| text.parse().unwrap());
    given.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64)
}

/// A volume, and its state according to its one client.
struct Volume {
    name: String,
    kind: VolumeKind,
    target: PathBuf,
    staging: PathBuf,
    published: bool,
    written: String,
    size: u64,
}

impl Volume {
    fn new(fixture: &Fixture, number: usize) -> Self {
        let kind = if number.is_multiple_of(2) { VolumeKind::Filesystem } else { VolumeKind::Block };
        let name = format!("v-{number}");
        fixture.volume(&name, kind);
        let target = fixture.target(&name);
        let staging = fixture.target(&format!("{name}-staging"));
        fs::create_dir(&staging).unwrap();
        Self { name, kind, target, staging, published: false, written: String::new(), size: MIB }
    }

    fn capability(&self) -> Option<wire::VolumeCapability> {
        match self.kind {
            VolumeKind::Filesystem => mount(&[]),
            VolumeKind::Block => block(),
        }
    }

    /// Publishes without staging, as after a reboot.
    fn publish(&mut self, driver: &mut Caller<'_>) {
        let request = publish(&self.name, &self.target, self.capability());
        driver.until_done(|client| client.node_publish_volume(request.clone()).map(drop));
        self.published = true;
    }

    /// A driver that has not opened its storage yet unmounts the target, and leaves the device to NodeUnstageVolume.
    fn unpublish(&mut self, driver: &mut Caller<'_>) {
        let request = unpublish(&self.name, &self.target);
        driver.until_done(|client| client.node_unpublish_volume(request.clone()).map(drop));
        if self.kind == VolumeKind::Block {
            let request = unstage(&self.name, &self.staging);
            driver.until_done(|client| client.node_unstage_volume(request.clone()).map(drop));
        }
        self.published = false;
    }

    fn expand(&mut self, driver: &mut Caller<'_>) {
        self.size = (self.size + STEP).min(MAX_SIZE);
        let size = i64::try_from(self.size).unwrap();
        driver.until_done(|client| {
            client.controller_expand_volume(controller_expand(&self.name, size, 0)).map(drop)
        });
        if self.published {
            let request = expand(&self.name, &self.target, size, 0);
            driver.until_done(|client| client.node_expand_volume(request.clone()).map(drop));
        }
    }

    fn write(&mut self, content: String) {
        match self.kind {
            VolumeKind::Filesystem => fs::write(self.target.join("file"), &content).unwrap(),
            VolumeKind::Block => write_to(&self.target, content.as_bytes()).unwrap(),
        }
        self.written = content;
    }

    fn assert_holds_what_was_written(&self) {
        let read = match self.kind {
            VolumeKind::Filesystem => fs::read(self.target.join("file")).unwrap(),
            VolumeKind::Block => read_from(&self.target, self.written.len()),
        };
        assert_eq!(String::from_utf8_lossy(&read), self.written, "{}", self.name);
    }

    /// One random step of a kubelet or a workload.
    fn step(&mut self, driver: &mut Caller<'_>, rng: &mut Rng) {
        match (rng.below(4), self.published) {
            (0, _) => self.expand(driver),
            (_, false) => {
                self.publish(driver);
                self.assert_holds_what_was_written();
            }
            (1, true) => {
                let content = format!("{} {}", self.name, rng.below(u64::MAX));
                self.write(content);
            }
            (_, true) => {
                self.assert_holds_what_was_written();
                self.unpublish(driver);
            }
        }
    }
}

/// The state that all clients share.
struct Callers<'a> {
    fixture: &'a Fixture,
    /// The process of the current driver.
    ended: Mutex<CancellationToken>,
    /// The number of calls that a killed driver interrupted.
    interrupted: AtomicUsize,
}

impl Callers<'_> {
    fn connect(&self) -> Client {
        // If this driver is killed in the meantime, the connection is to the next driver and is closed as well.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Client::connect_until(&self.fixture.directories.endpoint, ended)
    }
}

/// A client of a driver that may be killed at any moment.
struct Caller<'a> {
    all: &'a Callers<'a>,
    client: Client,
    /// Receives a message for each response.
    responded: Sender<()>,
}

impl<'a> Caller<'a> {
    fn new(all: &'a Callers<'a>, responded: Sender<()>) -> Self {
        Self { all, client: all.connect(), responded }
    }

    /// Repeats a call until a driver has lived long enough to respond.
    fn until_done(&mut self, call: impl Fn(&Client) -> Result<(), Status>) {
        let start = Instant::now();
        while let Err(status) = call(&self.client) {
            assert!(was_interrupted(&status), "{status:?}");
            assert!(start.elapsed() < TIMEOUT, "{status:?}");
            if status.source().is_some() {
                self.all.interrupted.fetch_add(1, Ordering::Relaxed);
                self.client = self.all.connect();
            } else {
                // The driver is opening its storage, or the call of a killed client is in progress.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        // There is no receiver after the last process was killed.
        self.responded.send(()).ok();
    }
}

/// Returns `true` if the status only reports that the driver was killed or has just started.
fn was_interrupted(status: &Status) -> bool {
    let beginning = status.message().contains("is being opened");
    status.source().is_some() || status.code() == Code::Aborted || beginning
}

#[test]
fn volumes_survive_fifty_killed_drivers() {
    let seed = seed();
    write_log(&format!("LOOPFS_TEST_SEED={seed}"));
    let mut rng = Rng(seed);
    let begun = Instant::now();
    let fixture = Fixture::without_driver();
    let started = || Process::start(&fixture.directories);
    let mut process = Some(started());
    let mut shares: Vec<Vec<Volume>> = (0..CALLERS).map(|_| Vec::new()).collect();
    for number in 0..VOLUMES {
        shares[number / 2 % CALLERS].push(Volume::new(&fixture, number));
    }
    let ended = Mutex::new(process.as_ref().unwrap().ended());
    let callers = Callers { fixture: &fixture, ended, interrupted: AtomicUsize::new(0) };
    let stop = AtomicBool::new(false);
    let mut calls = Vec::new();
    let mut storm = begun.elapsed();
    std::thread::scope(|scope| {
        let (responded, results) = mpsc::channel();
        let threads: Vec<_> = shares
            .iter_mut()
            .map(|share| {
                let (callers, stop, responded) = (&callers, &stop, responded.clone());
                let mut rng = Rng(rng.below(u64::MAX));
                scope.spawn(move || {
                    let mut driver = Caller::new(callers, responded);
                    for volume in share.iter_mut() {
                        volume.publish(&mut driver);
                        volume.write(format!("{} at first", volume.name));
                    }
                    while !stop.load(Ordering::Relaxed) {
                        let count = share.len() as u64;
                        share[rng.below(count) as usize].step(&mut driver, &mut rng);
                    }
                })
            })
            .collect();
        drop(responded);
        // Fewer messages arrive if a client has panicked. Joining it reports the reason.
        let wait_for = |count: usize| results.iter().take(count).count() == count;
        let published = wait_for(VOLUMES);
        storm = begun.elapsed();
        while published && calls.len() < KILLS {
            let life = rng.below(MAX_CALLS_BEFORE_KILL) as usize;
            if !wait_for(life) {
                break;
            }
            // The kill must come at a moment that no event announces.
            std::thread::sleep(Duration::from_micros(rng.below(MAX_KILL_DELAY.as_micros() as u64)));
            process.take().map(|process| process.signal(Signal::SIGKILL));
            calls.push(life + results.try_iter().count());
            let next = started();
            *callers.ended.lock().unwrap_or_else(PoisonError::into_inner) = next.ended();
            process = Some(next);
        }
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
    });
    let interrupted = callers.interrupted.load(Ordering::Relaxed);
    let lives = calls.len();
    write_log(&format!(
        "{VOLUMES} volumes published within {storm:.1?}, {lives} drivers killed within {:.1?}; these answered {} calls, {:?} each, \
         and took {interrupted} with them",
        begun.elapsed() - storm,
        calls.iter().sum::<usize>(),
        calls.iter().min()..=calls.iter().max(),
    ));
    assert!(interrupted > KILLS / 2, "the drivers were killed when they had nothing to do");

    let volumes: Vec<&Volume> = shares.iter().flatten().collect();
    assert_node_is_as_known(&fixture, &volumes);
    std::thread::scope(|scope| {
        for share in &mut shares {
            scope.spawn(|| {
                let mut last = Caller::new(&callers, mpsc::channel().0);
                for volume in share {
                    if !volume.published {
                        volume.publish(&mut last);
                    }
                    volume.assert_holds_what_was_written();
                    volume.unpublish(&mut last);
                    fs::remove_dir(&volume.staging).ok();
                }
            });
        }
    });
    assert!(process.unwrap().signal(Signal::SIGTERM).success());
    fixture.store.recover().unwrap();
    drop(callers);
    fixture.finish();
    write_log(&format!("all of it took {:.1?}", begun.elapsed()));
}

/// Checks for one device per published Block volume, one mount per published volume, the size that was requested last,
/// and nothing else.
fn assert_node_is_as_known(fixture: &Fixture, volumes: &[&Volume]) {
    let published_blocks =
        volumes.iter().filter(|volume| volume.published && volume.kind == VolumeKind::Block);
    let expected: BTreeMap<String, usize> = published_blocks.map(|volume| (volume.name.clone(), 1)).collect();
    let mut devices: BTreeMap<String, usize> = BTreeMap::new();
    for status in LoopControl::open().unwrap().list().unwrap() {
        assert!(status.direct_io, "{status:?}");
        *devices.entry(status.label).or_default() += 1;
    }
    assert_eq!(devices, expected, "devices are those of the published Block volumes");
    let mounts = mountinfo::read().unwrap();
    for volume in volumes {
        let mounted = mounts.iter().filter(|mount| mount.mount_point == volume.target).count();
        assert_eq!((mounted, volume.target.exists()), (usize::from(volume.published), volume.published));
        assert_eq!(fixture.store.volume(&id(&volume.name)).unwrap().capacity(), Bytes(volume.size));
    }
    write_log(&format!(
        "{} devices and {} mounts, as published",
        expected.len(),
        volumes.iter().filter(|volume| volume.published).count()
    ));
}
