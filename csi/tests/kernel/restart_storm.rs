//! Kills the driver again and again while clients use volumes, as the kubelet and pods do. A client repeats each call that
//! a kill interrupted. No kill may lose data, or leave a device or a mount that belongs to no published volume.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use loopfs::Bytes;
use loopfs::loop_device::LoopControl;
use loopfs::mount::table;
use loopfs::volume_store::VolumeKind;
use nix::sys::signal::Signal;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::driver_process::Process;
use crate::fixture::{Fixture, MIB, id, read_from, write_log, write_to};
use crate::support::*;

const VOLUMES: usize = 60;
const KILLS: usize = 50;
/// The number of clients. Each volume belongs to one of them, so the client knows in which state the volume must be.
const CLIENTS: usize = 4;
/// A driver returns fewer responses than this before it is killed. The number is random, and may be zero: so some drivers
/// are killed at their start, and most while they serve calls.
const MAX_RESPONSES_BEFORE_KILL: u64 = 12;
/// The maximum time from the last of these responses to the kill. The kill must come while a call is in progress.
const MAX_KILL_DELAY: Duration = Duration::from_millis(20);
/// Each expansion adds this number of bytes, up to the maximum capacity.
const EXPANSION: u64 = 4096;
const MAX_CAPACITY: u64 = 2 * MIB;

#[test]
fn volumes_survive_killed_drivers() {
    let seed = std::env::var("LOOPFS_TEST_SEED").expect("LOOPFS_TEST_SEED is set").parse().unwrap();
    write_log(&format!("LOOPFS_TEST_SEED={seed}"));
    let mut rng = Rng(seed);
    let start = Instant::now();
    let fixture = Fixture::without_driver();
    let mut volumes_of_clients: Vec<Vec<Volume>> = (0..CLIENTS).map(|_| Vec::new()).collect();
    for number in 0..VOLUMES {
        // Volumes with an even and an odd number are of different kinds, so each client gets both.
        volumes_of_clients[number / 2 % CLIENTS].push(Volume::new(&fixture, number));
    }
    let driver = Process::start(&fixture.directories);
    let shared = Shared {
        fixture: &fixture,
        driver_ended: Mutex::new(driver.ended()),
        interrupted_calls: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
    };
    let last_driver = std::thread::scope(|scope| {
        let (response_sender, responses) = mpsc::channel();
        let clients: Vec<_> = volumes_of_clients
            .iter_mut()
            .map(|volumes| {
                let (shared, response_sender) = (&shared, response_sender.clone());
                let client_rng = Rng(rng.below(u64::MAX));
                scope.spawn(move || use_volumes(volumes, Client::new(shared, response_sender), client_rng))
            })
            .collect();
        drop(response_sender);
        let last_driver = kill_drivers(driver, &shared, &responses, &mut rng);
        shared.stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().unwrap();
        }
        last_driver
    });
    let interrupted = shared.interrupted_calls.load(Ordering::Relaxed);
    write_log(&format!("the kills interrupted {interrupted} calls"));
    assert!(interrupted > KILLS / 2, "most kills interrupted no call");

    let volumes: Vec<&Volume> = volumes_of_clients.iter().flatten().collect();
    assert_node_is_as_clients_expect(&fixture, &volumes);
    std::thread::scope(|scope| {
        for volumes in &mut volumes_of_clients {
            let shared = &shared;
            scope.spawn(move || read_and_unpublish(volumes, Client::new(shared, mpsc::channel().0)));
        }
    });
    assert!(last_driver.signal(Signal::SIGTERM).success());
    fixture.store.recover().unwrap();
    drop(shared);
    fixture.finish();
    write_log(&format!("the whole test took {:.1?}", start.elapsed()));
}

/// Publishes the volumes, and uses them at random until the test stops the clients.
fn use_volumes(volumes: &mut [Volume], mut client: Client<'_>, mut rng: Rng) {
    for volume in volumes.iter_mut() {
        volume.publish(&mut client);
        volume.write(format!("{} at first", volume.name));
    }
    while !client.shared.stop.load(Ordering::Relaxed) {
        let chosen = rng.below(volumes.len() as u64) as usize;
        volumes[chosen].use_at_random(&mut client, &mut rng);
    }
}

/// Waits until all volumes are published. Then kills the driver and starts the next one, [`KILLS`] times. Returns the last
/// driver.
fn kill_drivers(
    mut driver: Process,
    shared: &Shared<'_>,
    responses: &Receiver<()>,
    rng: &mut Rng,
) -> Process {
    // If a client has panicked, the channel ends early. The test fails when it joins that client.
    let receive = |count: usize| responses.iter().take(count).count() == count;
    let start = Instant::now();
    let all_published = receive(VOLUMES);
    let published_at = Instant::now();
    let mut responses_of_drivers = Vec::new();
    while all_published && responses_of_drivers.len() < KILLS {
        let awaited = rng.below(MAX_RESPONSES_BEFORE_KILL) as usize;
        if !receive(awaited) {
            break;
        }
        // An event to wait for would put each kill at the same point of a call.
        std::thread::sleep(Duration::from_micros(rng.below(MAX_KILL_DELAY.as_micros() as u64)));
        driver.signal(Signal::SIGKILL);
        responses_of_drivers.push(awaited + responses.try_iter().count());
        driver = Process::start(&shared.fixture.directories);
        *shared.driver_ended.lock().unwrap_or_else(PoisonError::into_inner) = driver.ended();
    }
    write_log(&format!(
        "{VOLUMES} volumes published within {:.1?}, {} drivers killed within {:.1?}; these returned {} responses, {:?} each",
        published_at - start,
        responses_of_drivers.len(),
        published_at.elapsed(),
        responses_of_drivers.iter().sum::<usize>(),
        responses_of_drivers.iter().min()..=responses_of_drivers.iter().max(),
    ));
    driver
}

/// Checks for one device per published Block volume, one mount per published volume, the capacity that was requested last,
/// and nothing else.
fn assert_node_is_as_clients_expect(fixture: &Fixture, volumes: &[&Volume]) {
    let published_blocks =
        volumes.iter().filter(|volume| volume.published && volume.kind == VolumeKind::Block);
    let expected: BTreeMap<String, usize> = published_blocks.map(|volume| (volume.name.clone(), 1)).collect();
    let mut devices: BTreeMap<String, usize> = BTreeMap::new();
    for status in LoopControl::open().unwrap().list().unwrap().devices {
        assert!(status.direct_io, "{status:?}");
        *devices.entry(status.label).or_default() += 1;
    }
    assert_eq!(devices, expected, "the devices are not those of the published Block volumes");
    let mounts = table::read().unwrap();
    for volume in volumes {
        let mounted = mounts.iter().filter(|mount| mount.mount_point == volume.target).count();
        assert_eq!((mounted, volume.target.exists()), (usize::from(volume.published), volume.published));
        assert_eq!(fixture.store.volume(&id(&volume.name)).unwrap().capacity(), Bytes(volume.capacity));
    }
    write_log(&format!(
        "{} devices and {} mounts, as published",
        expected.len(),
        volumes.iter().filter(|volume| volume.published).count()
    ));
}

/// Checks the content of the volumes, and unpublishes them.
fn read_and_unpublish(volumes: &mut [Volume], mut client: Client<'_>) {
    for volume in volumes {
        if !volume.published {
            volume.publish(&mut client);
        }
        volume.assert_content();
        volume.unpublish(&mut client);
        fs::remove_dir(&volume.staging).unwrap();
    }
}

/// A volume, and the state in which its client expects it to be.
struct Volume {
    name: String,
    kind: VolumeKind,
    target: PathBuf,
    staging: PathBuf,
    published: bool,
    /// The text that was written last.
    content: String,
    /// The number of bytes that was requested last.
    capacity: u64,
}

impl Volume {
    fn new(fixture: &Fixture, number: usize) -> Self {
        let kind = if number.is_multiple_of(2) { VolumeKind::Filesystem } else { VolumeKind::Block };
        let name = format!("v-{number}");
        fixture.volume(&name, kind);
        let target = fixture.target(&name);
        let staging = fixture.target(&format!("{name}-staging"));
        fs::create_dir(&staging).unwrap();
        Self { name, kind, target, staging, published: false, content: String::new(), capacity: MIB }
    }

    /// Performs an action of a kubelet or a pod, chosen at random.
    fn use_at_random(&mut self, client: &mut Client<'_>, rng: &mut Rng) {
        match (rng.below(4), self.published) {
            (0, _) => self.expand(client),
            (1, true) => {
                let content = format!("{} {}", self.name, rng.below(u64::MAX));
                self.write(content);
            }
            (2.., true) => {
                self.assert_content();
                self.unpublish(client);
            }
            (1.., false) => {
                self.publish(client);
                self.assert_content();
            }
        }
    }

    /// Publishes without staging, as after a reboot.
    fn publish(&mut self, client: &mut Client<'_>) {
        let request = publish(&self.name, &self.target, capability_of(self.kind));
        client.call_until_done(|driver| driver.node_publish_volume(request.clone()).map(drop));
        self.published = true;
    }

    fn unpublish(&mut self, client: &mut Client<'_>) {
        let request = unpublish(&self.name, &self.target);
        client.call_until_done(|driver| driver.node_unpublish_volume(request.clone()).map(drop));
        // A driver that has not opened its storage yet only unmounts the target. NodeUnstageVolume detaches the device.
        if self.kind == VolumeKind::Block {
            let request = unstage(&self.name, &self.staging);
            client.call_until_done(|driver| driver.node_unstage_volume(request.clone()).map(drop));
        }
        self.published = false;
    }

    fn expand(&mut self, client: &mut Client<'_>) {
        self.capacity = (self.capacity + EXPANSION).min(MAX_CAPACITY);
        let capacity = i64::try_from(self.capacity).unwrap();
        client.call_until_done(|driver| {
            driver.controller_expand_volume(controller_expand(&self.name, capacity, 0)).map(drop)
        });
        if self.published {
            let request = expand(&self.name, &self.target, capacity, 0);
            client.call_until_done(|driver| driver.node_expand_volume(request.clone()).map(drop));
        }
    }

    fn write(&mut self, content: String) {
        match self.kind {
            VolumeKind::Filesystem => fs::write(self.target.join("file"), &content).unwrap(),
            VolumeKind::Block => write_to(&self.target, content.as_bytes()).unwrap(),
        }
        self.content = content;
    }

    fn assert_content(&self) {
        let read = match self.kind {
            VolumeKind::Filesystem => fs::read(self.target.join("file")).unwrap(),
            VolumeKind::Block => read_from(&self.target, self.content.len()),
        };
        assert_eq!(String::from_utf8_lossy(&read), self.content, "{}", self.name);
    }
}

/// The state that the clients share with the thread that kills the drivers.
struct Shared<'a> {
    fixture: &'a Fixture,
    /// Cancelled when the current driver has ended.
    driver_ended: Mutex<CancellationToken>,
    /// The number of calls that a kill interrupted.
    interrupted_calls: AtomicUsize,
    /// `true` if the clients are to stop.
    stop: AtomicBool,
}

/// The connection of a client to one driver. It fails for good when that driver ends.
type DriverClient = crate::support::Client;

/// A client of the driver that is running.
struct Client<'a> {
    shared: &'a Shared<'a>,
    driver: DriverClient,
    /// Receives a message for each call that the driver completed.
    response_sender: Sender<()>,
}

impl<'a> Client<'a> {
    fn new(shared: &'a Shared<'a>, response_sender: Sender<()>) -> Self {
        Self { shared, driver: connect(shared), response_sender }
    }

    /// Repeats a call until a driver lives long enough to complete it.
    fn call_until_done(&mut self, call: impl Fn(&DriverClient) -> Result<(), Status>) {
        let start = Instant::now();
        while let Err(status) = call(&self.driver) {
            assert!(is_transient(&status), "{status:?}");
            assert!(start.elapsed() < TIMEOUT, "{status:?}");
            if was_interrupted(&status) {
                self.shared.interrupted_calls.fetch_add(1, Ordering::Relaxed);
                self.driver = connect(self.shared);
            } else {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        // Nothing receives the messages after the last kill.
        self.response_sender.send(()).ok();
    }
}

fn connect(shared: &Shared<'_>) -> DriverClient {
    // If the driver is killed between these two lines, the connection is to the next driver, but all calls on it fail,
    // because the token is of the killed driver. The client then connects again.
    let ended = shared.driver_ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
    DriverClient::connect_until(&shared.fixture.directories.endpoint, ended)
}

/// Returns `true` if the call must be repeated: a kill interrupted it, the driver has not opened its storage yet, or the
/// previous attempt still has the volume locked.
fn is_transient(status: &Status) -> bool {
    let is_opening = status.message().contains("being opened");
    was_interrupted(status) || status.code() == Code::Aborted || is_opening
}

/// Returns `true` if the call failed because the driver was killed. A status that the driver itself returned has no source.
fn was_interrupted(status: &Status) -> bool {
    status.source().is_some()
}

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
