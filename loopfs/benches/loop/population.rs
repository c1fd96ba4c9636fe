//! The devices that are attached during a measurement, their files, and their removal.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use loopfs::baseline;
use loopfs::loop_device::{Access, AttachOptions, IndexPolicy, LoopControl, LoopDevice, PoolOptions};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::syncfs;

use crate::{Result, stop};

/// The label of every device of a run, and a part of the path of every file. The next run uses it to find the devices and files
/// of a killed run.
pub(crate) const LABEL: &str = "loopfs-bench";
/// The range of indices, apart from that of a driver on the same machine. The indices have valid minor numbers with `max_part` up
/// to 3.
const RANGE: Range<u32> = 0x2_0000..0x3_0000;
/// The part of the range that the library uses as its pool. The benchmark binds the other indices by number.
const POOL: Range<u32> = 0x2_0000..0x2_f000;
/// The index of the idle device that the bare calls bind.
pub(crate) const FLOOR_INDEX: u32 = POOL.end;

pub(crate) struct Population {
    pub(crate) control: LoopControl,
    pub(crate) raw: baseline::ControlDevice,
    directory: PathBuf,
    attached: Vec<File>,
    /// Detached files, which can be attached again.
    spare: Vec<File>,
    images: usize,
    /// Idle devices from before the run, perhaps of other programs. The run binds them temporarily, so that
    /// `LOOP_CTL_GET_FREE` finds no idle device, as on a machine where all devices come from it.
    borrowed: Vec<u32>,
    /// All devices that existed before the run.
    before: Vec<u32>,
    _alone: Flock<File>,
}

impl Population {
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        let lock = File::create(std::env::temp_dir().join(format!("{LABEL}.lock")))?;
        let alone = Flock::lock(lock, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, errno)| format!("another run is at it: {errno}"))?;
        let directory = directory.join(LABEL);
        clean_up(&directory)?;
        std::fs::create_dir_all(&directory)?;
        let raw = baseline::ControlDevice::open()?;
        let idle = |index: &u32| !RANGE.contains(index) && LoopDevice::open_index(*index).is_err();
        let before = baseline::indices()?;
        let borrowed = before.iter().copied().filter(idle).collect();
        raw.add(FLOOR_INDEX)?;
        let control = LoopControl::with_pool(PoolOptions { range: POOL, keep_idle: POOL.len() })?;
        Ok(Self {
            control,
            raw,
            directory,
            attached: Vec::new(),
            spare: Vec::new(),
            images: 0,
            borrowed,
            before,
            _alone: alone,
        })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Creates a sparse file of 1 MiB, as the store does for a volume.
    pub(crate) fn image(&self, name: &str) -> Result<File> {
        let image = File::options().read(true).write(true).create_new(true).open(self.path(name))?;
        image.set_len(1 << 20)?;
        baseline::mark_new_file_tracked(&image)?;
        // The file is open for reading only, as in a driver. If it were open for writing, the library would take the open file
        // description for the device of another program.
        drop(image);
        Ok(File::open(self.path(name))?)
    }

    /// Attaches or detaches files until `count` files are attached. Devices of detached files stay idle.
    pub(crate) fn resize(&mut self, count: usize) -> Result<()> {
        while self.attached.len() > count
            && let Some(image) = self.attached.pop()
        {
            self.control.detach_all(image.as_fd())?;
            self.spare.push(image);
        }
        while self.attached.len() < count {
            stop::check()?;
            let image = match self.spare.pop() {
                Some(image) => image,
                None => {
                    self.images += 1;
                    self.image(&format!("{}.img", self.images))?
                }
            };
            let index = self.borrowed.pop().map_or(IndexPolicy::Pool, IndexPolicy::Exact);
            self.control.attach(image.as_fd(), &options().index(index))?;
            self.attached.push(image);
        }
        // Dirty data would slow down each flush of the file system.
        syncfs(File::open(&self.directory)?)?;
        Ok(())
    }

    /// Closes the files; their devices stay attached. Starting a process takes longer for each file that this one has open.
    pub(crate) fn close_files(&mut self) {
        self.attached.clear();
        self.spare.clear();
    }

    /// Detaches each file as a caller does, and waits until the devices are removed. Returns the number of removed devices.
    pub(crate) fn remove(&mut self) -> Result<usize> {
        let count = pool()?;
        let control = LoopControl::with_pool(PoolOptions { range: POOL, keep_idle: 0 })?;
        for image in self.attached.drain(..) {
            control.detach_all(image.as_fd())?;
        }
        self.control.remove_idle(0);
        let deadline = Instant::now() + Duration::from_secs(600);
        while pool()? > 0 {
            stop::check()?;
            if Instant::now() > deadline {
                return Err("idle devices remain that remove_idle does not remove".into());
            }
            if control.remove_idle(0) == 0 {
                // The background thread removes the other devices.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(count)
    }
}

/// Returns the number of devices in the pool, bound or idle.
fn pool() -> Result<usize> {
    Ok(baseline::indices()?.into_iter().filter(|index| POOL.contains(index)).count())
}

impl Drop for Population {
    fn drop(&mut self) {
        let result = clean_up(&self.directory).and_then(|detached| {
            let ours =
                detached.into_iter().filter(|index| !self.before.contains(index) && !RANGE.contains(index));
            ours.into_iter().try_for_each(|index| Ok(self.raw.remove(index)?))
        });
        if let Err(error) = result {
            eprintln!("cleaning up: {error}");
        }
    }
}

/// Returns the options with which a driver attaches the image of a volume.
pub(crate) fn options() -> AttachOptions {
    AttachOptions::new(Access::ReadWrite).label(LABEL)
}

/// Removes everything that this run or a killed one created. Returns the indices of the devices that were still attached.
fn clean_up(directory: &Path) -> Result<Vec<u32>> {
    let mut detached = Vec::new();
    let control = LoopControl::with_pool(PoolOptions { range: RANGE, keep_idle: 0 })?;
    for status in control.list()?.devices {
        if status.label.contains(LABEL) {
            let device = LoopDevice::open_binding(&status.binding);
            device.and_then(|device| Ok(device.detach()?)).map(drop).or_else(gone)?;
            detached.push(status.binding.index);
        }
    }
    LoopControl::with_pool(PoolOptions { range: RANGE, keep_idle: 0 })?.remove_idle(0);
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(detached),
    }
}

fn gone(error: loopfs::Error) -> Result<(), loopfs::Error> {
    if error.kind() == loopfs::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
