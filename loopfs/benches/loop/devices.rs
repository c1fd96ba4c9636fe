//! Attaching, finding, detaching and removing devices, with an increasing number of devices attached.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use loopfs::baseline;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::population::{FLOOR_INDEX, LABEL, Population, options};
use crate::samples::{Samples, Series};
use crate::{Result, Size, machine, stop};

struct Plan {
    counts: &'static [usize],
    /// Number of rounds. Each round measures every count once, so that a temporarily slow disk affects all counts alike.
    rounds: usize,
    /// Number of alternating runs of the library and of the bare calls for each count in a round.
    runs: usize,
    /// In the first round, the methods of other programs are measured once in this many runs. Later rounds have idle devices.
    others_every: usize,
    /// Number of rounds of attaching the largest count of devices and removing all of them.
    removals: usize,
    removed_one_at_a_time: usize,
}

impl Size {
    fn plan(self) -> Plan {
        match self {
            Size::Full => Plan {
                counts: &[10, 1000, 4000],
                rounds: 10,
                runs: 100,
                others_every: 2,
                removals: 3,
                removed_one_at_a_time: 50,
            },
            Size::Quick => Plan {
                counts: &[10, 200],
                rounds: 2,
                runs: 50,
                others_every: 5,
                removals: 1,
                removed_one_at_a_time: 10,
            },
        }
    }
}

pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let plan = size.plan();
    let mut population = Population::new(directory)?;
    let scene = Scene::new(&population)?;
    let mut series: Vec<Series> =
        plan.counts.iter().map(|count| Series::new(&MEASUREMENTS, *count)).collect();
    for round in 0..plan.rounds {
        for series in &mut series {
            eprintln!("round {round} of {}: {} devices", plan.rounds, series.n);
            population.resize(series.n)?;
            let others = (round == 0).then_some(plan.others_every);
            scene.measure(&population, series, plan.runs, others)?;
        }
    }
    series.into_iter().for_each(Series::print);
    scene.measure_removal(&mut population, &plan)
}

/// The measurements with one number of devices attached. In the last two, 8 MiB are written without fsync(2) before the detach.
const MEASUREMENTS: [&str; 11] = [
    "floor_attach",
    "attach_pool",
    "attach_get_free",
    "losetup_attach",
    "find_device",
    "losetup_j",
    "floor_detach",
    "detach",
    "losetup_detach",
    "write_and_detach",
    "write_and_losetup_detach",
];

/// The files that the runs attach and detach, one for each method.
struct Scene {
    configuration: baseline::Configuration,
    image: File,
    large_image: File,
    port_configuration: baseline::Configuration,
    has_losetup: bool,
    _configured: [File; 2],
}

impl Scene {
    fn new(population: &Population) -> Result<Self> {
        let direct = |name: &str| -> Result<File> {
            population.image(name)?.sync_all()?;
            let flags = OFlag::O_DIRECT.bits();
            let path = population.path(name);
            Ok(File::options().read(true).write(true).custom_flags(flags).open(path)?)
        };
        let (floor_image, port_image) = (direct("floor.img")?, direct("port.img")?);
        population.image(LOSETUP_IMAGE)?.sync_all()?;
        let image = population.image("library.img")?;
        image.sync_all()?;
        let large_image = population.image(LARGE_IMAGE)?;
        // With all its blocks, so that each run writes to the same ones.
        std::fs::write(population.path(LARGE_IMAGE), vec![0; LARGE])?;
        large_image.sync_all()?;
        let has_losetup = Command::new("losetup").arg("--version").output().is_ok_and(|o| o.status.success());
        if !has_losetup {
            eprintln!("losetup is not installed: its rows will be missing");
        }
        Ok(Self {
            configuration: baseline::Configuration::new(floor_image.as_fd(), LABEL),
            port_configuration: baseline::Configuration::new(port_image.as_fd(), LABEL),
            image,
            large_image,
            has_losetup,
            _configured: [floor_image, port_image],
        })
    }

    fn measure(
        &self,
        population: &Population,
        series: &mut Series,
        runs: usize,
        others_every: Option<usize>,
    ) -> Result<()> {
        // A warm-up run puts a device into the pool, and fills the caches.
        let warm = population.control.attach(self.image.as_fd(), &options())?;
        population.control.detach(warm)?;
        population.control.find(self.image.as_fd())?;

        for run in 0..runs {
            stop::check()?;
            // The two methods take turns, because the first one after a pause has colder caches.
            let bare_first = run % 2 == 0;
            let bare = |series: &mut Series| {
                series.time("floor_attach", || baseline::attach(FLOOR_INDEX, &self.configuration))
            };
            let ours = |series: &mut Series| {
                series.time("attach_pool", || population.control.attach(self.image.as_fd(), &options()))
            };
            let (floor_device, device) = if bare_first {
                let floor_device = bare(series)?;
                (floor_device, ours(series)?)
            } else {
                let device = ours(series)?;
                (bare(series)?, device)
            };
            let found = series.time("find_device", || population.control.find(self.image.as_fd()))?;
            if found.len() != 1 || found[0].binding() != device.binding() {
                return Err("the device of the file was not found".into());
            }
            drop(found);
            // This must run while no device is idle, as on a machine where all devices come from LOOP_CTL_GET_FREE.
            if others_every.is_some_and(|every| run % every == 0) {
                self.measure_others(population, series)?;
            }
            let bare = |series: &mut Series| {
                series.time("floor_detach", || baseline::detach(floor_device, FLOOR_INDEX))
            };
            let ours = |series: &mut Series| series.time("detach", || population.control.detach(device));
            if bare_first {
                bare(series)?;
                ours(series)?;
            } else {
                ours(series)?;
                bare(series)?;
            }
        }
        Ok(())
    }

    fn measure_others(&self, population: &Population, series: &mut Series) -> Result<()> {
        // The device of the large image of the run before, which LOOP_CTL_GET_FREE would find.
        population.control.remove_idle(0);
        let before = baseline::indices()?;
        let (device, port) = series.time("attach_get_free", || self.attach_by_get_free(population))?;
        // If udev or another program has an idle device open, the kernel does not remove it.
        if before.contains(&port) {
            return Err(format!("LOOP_CTL_GET_FREE found the idle device {port}").into());
        }
        if self.has_losetup {
            let path = population.path(LOSETUP_IMAGE);
            let index = series.time("losetup_attach", || losetup_attach_file(&path))?;
            series.time("losetup_j", || losetup_find(&path))?;
            series.time("losetup_detach", || losetup_detach(index))?;
            population.raw.remove(index)?;
            self.write_and_detach(population, series)?;
        }
        baseline::detach(device, port)?;
        Ok(population.raw.remove(port)?)
    }

    /// Writes 8 MiB to a device without fsync(2), and detaches it. The library has the device open, so it writes the page cache of
    /// the device; without it, the close of the program that wrote does that.
    fn write_and_detach(&self, population: &Population, series: &mut Series) -> Result<()> {
        let device = population.control.attach(self.large_image.as_fd(), &options())?;
        let path = device.path();
        series.time("write_and_detach", || -> Result<()> {
            write(&path)?;
            Ok(population.control.detach(device).map(drop)?)
        })?;
        let index = losetup_attach_file(&population.path(LARGE_IMAGE))?;
        series.time("write_and_losetup_detach", || -> Result<()> {
            write(format!("/dev/loop{index}"))?;
            losetup_detach(index)
        })?;
        Ok(population.raw.remove(index)?)
    }

    /// Attaches with `LOOP_CTL_GET_FREE`, open and `LOOP_CONFIGURE`, and tries again if another program was faster. Programs
    /// that use this method remove a device when they detach it, so the kernel has to create a device each time.
    fn attach_by_get_free(&self, population: &Population) -> Result<(OwnedFd, u32)> {
        loop {
            let index = population.raw.get_free()?;
            match baseline::attach(index, &self.port_configuration) {
                Ok(device) => return Ok((device, index)),
                Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

const LOSETUP_IMAGE: &str = "losetup.img";
const LARGE_IMAGE: &str = "large.img";
const LARGE: usize = 8 << 20;

fn write(device: impl AsRef<Path>) -> Result<()> {
    Ok(File::options().write(true).open(device)?.write_all(&[1; LARGE])?)
}

fn losetup_attach_file(path: &Path) -> Result<u32> {
    let output = Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(path).output()?;
    let name = String::from_utf8(output.stdout)?;
    let index = name.trim().strip_prefix("/dev/loop").and_then(|index| index.parse().ok());
    index.ok_or_else(|| format!("losetup: {}", String::from_utf8_lossy(&output.stderr)).into())
}

fn losetup_detach(index: u32) -> Result<()> {
    let status = Command::new("losetup").arg("--detach").arg(format!("/dev/loop{index}")).status()?;
    if status.success() { Ok(()) } else { Err(format!("losetup --detach: {status}").into()) }
}

fn losetup_find(path: &Path) -> Result<()> {
    let output = Command::new("losetup").arg("-j").arg(path).output()?;
    if output.stdout.is_empty() { Err("losetup did not find the device".into()) } else { Ok(()) }
}

impl Scene {
    fn measure_removal(&self, population: &mut Population, plan: &Plan) -> Result<()> {
        let count = plan.counts.last().copied().unwrap_or_default();
        let mut background = Samples::per("us/device", "remove_background", count);
        let mut serial = Samples::per("us/device", "remove_serial", count);
        for round in 0..plan.removals {
            eprintln!("removing {count} devices: round {round} of {}", plan.removals);
            population.resize(count)?;
            let started = Instant::now();
            let removed = population.remove()?;
            background.push(started.elapsed() / u32::try_from(removed)?);
            for _ in 0..plan.removed_one_at_a_time / plan.removals {
                stop::check()?;
                let device = baseline::attach(FLOOR_INDEX, &self.configuration)?;
                serial.time(|| {
                    baseline::detach(device, FLOOR_INDEX).and_then(|()| population.raw.remove(FLOOR_INDEX))
                })?;
                population.raw.add(FLOOR_INDEX)?;
            }
        }
        background.print();
        serial.print();
        Ok(())
    }
}
