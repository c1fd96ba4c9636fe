//! A model of the loop driver that replaces `loop_dev.rs` in unit tests. It shows how the library reacts to a schedule of calls,
//! a lost race, an errno or a crash at any point. It proves nothing about the kernel; the tests in `tests/kernel` do.
//!
//! A device has a page cache: [`LoopModel::write`] makes it dirty, and the last close of a bound device writes it to the file. Data
//! that the kernel would lose instead is a violation.
//!
//! Each thread has its own model. An open device is a descriptor of a memory file, whose inode number no other descriptor has, so
//! that the model can detect its close.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::loop_abi::{AUTOCLEAR, DIRECT_IO, DiscardLimit, index_limit_of, loop_config, loop_info64};
use super::result::Result;

/// The program that has bound a device.
pub(crate) type Actor = u32;

/// A program that uses the library.
const LIBRARY: Actor = 0;
/// A program that uses the driver without this library.
pub(crate) const FOREIGN: Actor = 99;

#[derive(Debug, Default)]
pub(crate) struct LoopModel {
    devices: BTreeMap<u32, ModelDevice>,
    handles: Vec<Handle>,
    last_sequence: u64,
    /// From Linux 6.11 on, LOOP_CLR_FD takes effect at the last close of the device, not immediately.
    pub(crate) unbinds_at_last_close: bool,
    /// Before Linux 5.15, devices have no sequence numbers.
    pub(crate) lacks_sequences: bool,
    /// The driver always grants buffered I/O, even if the caller requests direct I/O.
    pub(crate) lacks_direct_io: bool,
    /// Before Linux 6.9, LOOP_CONFIGURE and LOOP_SET_STATUS64 reset the discard limit.
    pub(crate) forgets_discard_limits: bool,
    /// From some version before Linux 6.18 on, disabled discards stay disabled until the device is removed.
    pub(crate) keeps_discards_disabled: bool,
    /// The driver accepts a discard limit but does not store it.
    pub(crate) ignores_discard_limits: bool,
    /// The errnos that the next calls of a name return instead of having an effect.
    pub(crate) failures: HashMap<&'static str, VecDeque<Errno>>,
    /// Number of calls until the process dies.
    pub(crate) crash_after: Option<usize>,
    /// Number of calls until one returns EIO instead of having an effect.
    pub(crate) error_after: Option<usize>,
    /// Number of calls until another program binds the index of this process's next call.
    pub(crate) foreign_binds_after: Option<usize>,
    /// Number of calls until another program opens the device of this process's next call, writes a block to it, and closes it.
    pub(crate) foreign_writes_after: Option<usize>,
    /// Forbidden calls that were made, as messages.
    pub(crate) violations: Vec<String>,
    /// Number of calls by name.
    pub(crate) calls: HashMap<&'static str, usize>,
    /// The module parameter `max_part`. Partitions take minor numbers and reduce the number of indices.
    pub(crate) max_part: u32,
    /// If set, the file is resized to this many bytes when it is bound, as if another process changed its size concurrently.
    pub(crate) size_when_bound: Option<u64>,
    /// A process that has the device open unbinds it as soon as it has it open alone.
    pub(crate) foreign_unbinds_at_close: bool,
    /// The devices whose node is mounted somewhere.
    pub(crate) mounted: BTreeSet<u32>,
    /// The devices whose `lo_mutex` a process holds: opening or removing them waits. All tests have one record of the devices that do not
    /// respond, so each test has others.
    pub(crate) locked: BTreeSet<u32>,
    /// The devices whose file is on a dead file system.
    pub(crate) dead_files: BTreeSet<u32>,
}

#[derive(Debug, Default)]
struct ModelDevice {
    bound: Option<ModelBinding>,
    /// LOOP_CLR_FD has unbound the device, but it is still open.
    rundown: bool,
    sequence: u64,
    /// The discard limit set in sysfs, `None` if it was never set.
    discard_limit: Option<u64>,
    /// Written blocks in the page cache of the device that are not in the file.
    dirty: usize,
}

/// The largest discard that the driver supports, in bytes.
const DISCARD_HARDWARE: u64 = (u32::MAX as u64 >> 9) << 9;
const DISCARD_UNIT: u64 = 4096;

#[derive(Debug)]
struct ModelBinding {
    info: loop_info64,
    file: File,
    block_size: u32,
    size: u64,
    owner: Actor,
}

#[derive(Debug)]
struct Handle {
    index: u32,
    writable: bool,
    raw: RawFd,
    inode: u64,
}

impl Handle {
    /// Returns `true` if this process has closed the descriptor. A copy that another test gave to a child process does not count:
    /// between fork(2) and execve(2) a child has copies of all descriptors.
    fn is_closed(&self) -> bool {
        inode_of(self.raw) != Some(self.inode)
    }
}

/// Returns the inode number of a descriptor, or `None` if it is not open.
fn inode_of(raw: RawFd) -> Option<u64> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: fstat writes one `struct stat`, and returns EBADF if the descriptor is not open.
    let result = unsafe { libc::fstat(raw, status.as_mut_ptr()) };
    // SAFETY: all-zero is a valid `struct stat`.
    Errno::result(result).ok().map(|_| unsafe { status.assume_init() }.st_ino)
}

type SharedModel = Arc<Mutex<LoopModel>>;

thread_local! {
    static MODEL: RefCell<SharedModel> = RefCell::default();
}

/// Models by control descriptor, for threads that share only the control descriptor with the thread of the model.
static BY_CONTROL: LazyLock<Mutex<HashMap<RawFd, SharedModel>>> = LazyLock::new(Mutex::default);

/// Gives this thread a new, empty model and configures it with `change`.
pub(crate) fn reset(change: impl FnOnce(&mut LoopModel)) {
    MODEL.set(SharedModel::default());
    with(change);
}

/// Reads or changes the model of this thread directly.
pub(crate) fn with<T>(look: impl FnOnce(&mut LoopModel) -> T) -> T {
    let model = MODEL.with_borrow(Arc::clone);
    let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
    model.reap();
    look(&mut model)
}

/// Counts a call. Returns `true` if it is the one that was waited for.
fn is_due(left: &mut Option<usize>) -> bool {
    let is_due = *left == Some(0);
    *left = left.and_then(|left| left.checked_sub(1));
    is_due
}

impl LoopModel {
    /// Returns index, inode and actor of every bound device.
    pub(crate) fn bound(&self) -> Vec<(u32, u64, Actor)> {
        let bound = |(index, device): (&u32, &ModelDevice)| {
            device.bound.as_ref().map(|b| (*index, b.info.lo_inode, b.owner))
        };
        self.devices.iter().filter_map(bound).collect()
    }

    pub(crate) fn exist(&self) -> Vec<u32> {
        self.devices.keys().copied().collect()
    }

    pub(crate) fn bind_foreign(&mut self, index: u32) {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("its size");
        self.bind_file(index, file, FOREIGN);
    }

    /// Binds a file to an index without this library.
    pub(crate) fn bind_file(&mut self, index: u32, file: File, owner: Actor) {
        let config = super::loop_abi::config(file.as_raw_fd(), 512);
        self.devices.entry(index).or_default();
        self.bind(index, &config, owner).ok();
    }

    /// Adds an idle device without this library.
    pub(crate) fn add_idle(&mut self, index: u32) {
        self.last_sequence += 1;
        self.devices.insert(index, ModelDevice { sequence: self.last_sequence, ..ModelDevice::default() });
    }

    /// Unbinds an index without this library.
    pub(crate) fn unbind_all(&mut self, indices: impl IntoIterator<Item = u32>) {
        indices.into_iter().for_each(|index| self.unbind(index));
    }

    fn bind(&mut self, index: u32, config: &loop_config, owner: Actor) -> Result<()> {
        let forgets = self.forgets_discard_limits;
        let device = self.devices.get_mut(&index).ok_or(Errno::ENXIO)?;
        if device.bound.is_some() || device.rundown {
            return Err(Errno::EBUSY);
        }
        if forgets {
            device.discard_limit = None;
        }
        // SAFETY: the caller keeps the descriptor of the file open during the call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(config.fd as RawFd) };
        // The driver, too, keeps the open file description, and with it its locks, as long as the device is bound.
        let file = File::from(descriptor.try_clone_to_owned().or(Err(Errno::EBADF))?);
        if let Some(size) = self.size_when_bound {
            file.set_len(size).or(Err(Errno::EIO))?;
        }
        let metadata = file.metadata().or(Err(Errno::EIO))?;
        let mut info = config.info;
        (info.lo_device, info.lo_inode, info.lo_number) = (metadata.dev(), metadata.ino(), index);
        if self.lacks_direct_io {
            info.lo_flags &= !DIRECT_IO;
        }
        self.last_sequence += 1;
        device.sequence = self.last_sequence;
        let mut bound = ModelBinding { info, file, block_size: config.block_size.max(512), size: 0, owner };
        bound.refresh();
        device.bound = Some(bound);
        Ok(())
    }

    fn unbind(&mut self, index: u32) {
        self.last_sequence += 1;
        self.lose_dirty(index);
        if let Some(device) = self.devices.get_mut(&index) {
            (device.bound, device.rundown, device.sequence) = (None, false, self.last_sequence);
        }
    }

    /// Writes a block through the page cache of a device, as a program does that has it open and does not call fsync(2).
    pub(crate) fn write(&mut self, index: u32) {
        if let Some(device) = self.devices.get_mut(&index).filter(|device| device.bound.is_some()) {
            device.dirty += 1;
        }
    }

    /// The device refuses writes from now on, so its page cache cannot be written.
    fn lose_dirty(&mut self, index: u32) {
        let lost = self.devices.get_mut(&index).map_or(0, |device| std::mem::take(&mut device.dirty));
        if lost > 0 {
            self.violations.push(format!("{lost} written blocks of loop{index} were lost"));
        }
    }

    /// The last close of a device: writes its page cache, and unbinds it if that was requested.
    fn close_last(&mut self, index: u32) {
        let Some(device) = self.devices.get_mut(&index) else { return };
        if device.bound.is_some() {
            device.dirty = 0;
        }
        if device.rundown || device.bound.as_ref().is_some_and(|bound| bound.info.lo_flags & AUTOCLEAR != 0) {
            self.unbind(index);
        }
    }

    fn open(&mut self, index: u32, writable: bool) -> Result<OwnedFd> {
        let file = memfd_create("loop device", MFdFlags::MFD_CLOEXEC)?;
        let inode = inode_of(file.as_raw_fd()).ok_or(Errno::EBADF)?;
        self.handles.push(Handle { index, writable, raw: file.as_raw_fd(), inode });
        Ok(file)
    }

    fn openers(&self, index: u32) -> usize {
        self.handles.iter().filter(|handle| handle.index == index).count()
    }

    /// Detects descriptors that were closed since the last call, and unbinds devices at their last close as the driver does.
    fn reap(&mut self) {
        let gone: Vec<u32> =
            self.handles.extract_if(.., |handle| handle.is_closed()).map(|handle| handle.index).collect();
        for index in gone {
            match self.openers(index) {
                0 => self.close_last(index),
                1 if self.foreign_unbinds_at_close => self.unbind(index),
                _ => {}
            }
        }
    }

    /// Runs at the start of each call: injects an errno, a crash, or another program that wins a race.
    fn enter(&mut self, call: &'static str, index: Option<u32>) -> Result<()> {
        self.reap();
        *self.calls.entry(call).or_default() += 1;
        if is_due(&mut self.crash_after) {
            std::panic::resume_unwind(Box::new("crash"));
        }
        if let Some(index) = index {
            if is_due(&mut self.foreign_binds_after) && self.devices.contains_key(&index) {
                self.bind_foreign(index);
            }
            if is_due(&mut self.foreign_writes_after) {
                self.write(index);
                if self.openers(index) == 0 {
                    self.close_last(index);
                }
            }
        }
        if is_due(&mut self.error_after) {
            return Err(Errno::EIO);
        }
        match self.failures.get_mut(call).and_then(VecDeque::pop_front) {
            Some(errno) => Err(errno),
            None => Ok(()),
        }
    }

    fn handle_of(&self, device: impl AsFd) -> Result<&Handle> {
        let raw = device.as_fd().as_raw_fd();
        self.handles.iter().rev().find(|handle| handle.raw == raw).ok_or(Errno::EBADF)
    }

    fn index_of(&self, device: impl AsFd) -> Result<u32> {
        self.handle_of(device).map(|handle| handle.index)
    }

    fn bound_of(&mut self, call: &'static str, device: impl AsFd) -> Result<(u32, &mut ModelBinding)> {
        self.reap();
        let index = self.index_of(device)?;
        self.enter(call, Some(index))?;
        let device = self.devices.get_mut(&index).ok_or(Errno::ENXIO)?;
        if device.rundown {
            return Err(Errno::ENXIO);
        }
        device.bound.as_mut().map(|bound| (index, bound)).ok_or(Errno::ENXIO)
    }
}

impl ModelBinding {
    fn refresh(&mut self) {
        let length = self.file.metadata().map_or(0, |metadata| metadata.len());
        let rest = length.saturating_sub(self.info.lo_offset);
        let shown = if self.info.lo_sizelimit == 0 { rest } else { rest.min(self.info.lo_sizelimit) };
        self.size = shown - shown % 512;
    }
}

/// Runs `work` on the model of a control descriptor, or on that of the thread if a test opened the real device.
fn by_control<T>(control: impl AsFd, work: impl FnOnce(&mut LoopModel) -> T) -> T {
    let registered = BY_CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
    let model = registered.get(&control.as_fd().as_raw_fd()).map(Arc::clone);
    drop(registered);
    let model = model.unwrap_or_else(|| MODEL.with_borrow(Arc::clone));
    let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
    work(&mut model)
}

pub(crate) fn open_control() -> Result<OwnedFd> {
    let control = OwnedFd::from(tempfile::tempfile().expect("a file"));
    let model = MODEL.with_borrow(Arc::clone);
    BY_CONTROL.lock().unwrap_or_else(PoisonError::into_inner).insert(control.as_raw_fd(), model);
    Ok(control)
}

pub(crate) fn open_device(index: u32, writable: bool) -> Result<OwnedFd> {
    while with(|model| model.locked.contains(&index)) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    with(|model| {
        model.enter("open", Some(index))?;
        let device = model.devices.get(&index).ok_or(Errno::ENOENT)?;
        if device.rundown {
            return Err(Errno::ENXIO);
        }
        model.open(index, writable)
    })
}

pub(crate) fn open_existing(index: u32, writable: bool) -> Result<OwnedFd> {
    open_device(index, writable)
}

pub(crate) fn open_again(device: impl AsFd, expected: u32) -> Result<OwnedFd> {
    with(|model| {
        let index = model.index_of(device)?;
        if index != expected {
            model.violations.push(format!("loop{expected} was opened instead of loop{index}"));
        }
        model.enter("open_again", Some(index))?;
        if model.devices.get(&index).is_none_or(|device| device.rundown) {
            return Err(Errno::ENXIO);
        }
        model.open(index, false)
    })
}

/// The devices of the model have no partitions.
pub(crate) fn partitions(_index: u32) -> Result<Vec<String>> {
    Ok(Vec::new())
}

pub(crate) fn open_partition(_index: u32, _name: &str) -> Result<OwnedFd> {
    Err(Errno::ENOENT)
}

/// A failed write is not repeated: the kernel keeps the page, which is no longer dirty.
pub(crate) fn write_back(device: impl AsFd) -> Result<()> {
    with(|model| {
        let index = model.index_of(device)?;
        let written = model.enter("write_back", Some(index));
        if let Some(device) = model.devices.get_mut(&index).filter(|device| device.bound.is_some()) {
            device.dirty = 0;
        }
        written
    })
}

pub(crate) fn device_number(device: impl AsFd) -> Result<u64> {
    with(|model| model.index_of(device).map(|index| nix::sys::stat::makedev(7, index.into())))
}

pub(crate) fn number(index: u32) -> Result<u64> {
    with(|model| {
        model.devices.get(&index).map(|_| nix::sys::stat::makedev(7, index.into())).ok_or(Errno::ENOENT)
    })
}

pub(crate) fn kernel() -> usize {
    MODEL.with_borrow(|model| Arc::as_ptr(model).addr())
}

/// The thread has the model of this one.
pub(crate) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    with(|model| model.enter("spawn", None))?;
    let model = MODEL.with_borrow(Arc::clone);
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        MODEL.set(model);
        work();
    })
}

pub(crate) fn indices() -> Result<Vec<u32>> {
    with(|model| Ok(model.exist()))
}

pub(crate) fn indices_in_sysfs_order() -> Result<Vec<u32>> {
    indices()
}

pub(crate) fn attachment_inodes(indices: &[u32]) -> Result<Vec<Option<u64>>> {
    with(|model| {
        // A device that was unbound while it is open keeps its directory.
        let bound =
            |index| model.devices.get(index).filter(|device| device.bound.is_some() || device.rundown);
        Ok(indices.iter().map(|index| bound(index).map(|device| device.sequence)).collect())
    })
}

pub(crate) fn is_bound(index: u32) -> bool {
    attachment_inodes(&[index]).is_ok_and(|inodes| inodes[0].is_some())
}

pub(crate) fn mounted() -> Result<BTreeSet<u32>> {
    with(|model| model.enter("mounted", None).map(|()| model.mounted.clone()))
}

pub(crate) fn unbinds_at_last_close() -> bool {
    with(|model| model.unbinds_at_last_close)
}

pub(crate) fn attribute_bytes(index: u32, name: &str) -> Result<Vec<u8>> {
    with(|model| {
        let bound =
            model.devices.get(&index).and_then(|device| device.bound.as_ref()).ok_or(Errno::ENOENT)?;
        Ok(match name {
            "loop/backing_file" => {
                let path = std::fs::read_link(format!("/proc/self/fd/{}", bound.file.as_raw_fd()));
                path.or(Err(Errno::EIO))?.display().to_string()
            }
            "loop/autoclear" => u32::from(bound.info.lo_flags & AUTOCLEAR != 0).to_string(),
            // Only kernel tests read the others.
            _ => return Err(Errno::ENOENT),
        }
        .into_bytes())
    })
}

/// The model sends a uevent when a device is bound or unbound.
pub(crate) fn uevent_count() -> Result<u64> {
    with(|model| Ok(model.last_sequence))
}

pub(crate) fn index_limit() -> u32 {
    with(|model| index_limit_of(model.max_part))
}

pub(crate) fn exists(index: u32) -> bool {
    with(|model| model.devices.contains_key(&index))
}

pub(crate) fn discard_limit(index: u32, limit: DiscardLimit) -> Result<u64> {
    with(|model| {
        model.enter("discard_limit", Some(index))?;
        let keeps = model.keeps_discards_disabled;
        let device = model.devices.get(&index).ok_or(Errno::ENOENT)?;
        Ok(match limit {
            DiscardLimit::Set => device.discard_limit.unwrap_or(DISCARD_HARDWARE),
            DiscardLimit::Hardware => DISCARD_HARDWARE,
            DiscardLimit::Unit if keeps && device.discard_limit == Some(0) => 0,
            DiscardLimit::Unit => DISCARD_UNIT,
        })
    })
}

pub(crate) fn takes_discards(device: impl AsFd) -> Option<bool> {
    with(|model| {
        let (index, writable) = model.handle_of(device).map(|handle| (handle.index, handle.writable)).ok()?;
        model.enter("takes_discards", Some(index)).ok().filter(|()| writable)?;
        let device = model.devices.get(&index)?;
        Some(device.discard_limit != Some(0))
    })
}

pub(crate) fn set_discard_limit(index: u32, bytes: u64) -> Result<()> {
    with(|model| {
        model.enter("set_discard_limit", Some(index))?;
        let (ignores, keeps) = (model.ignores_discard_limits, model.keeps_discards_disabled);
        let device = model.devices.get_mut(&index).ok_or(Errno::ENOENT)?;
        let stays_disabled = keeps && device.discard_limit == Some(0);
        if bytes > u64::from(u32::MAX) || !bytes.is_multiple_of(DISCARD_UNIT) || (stays_disabled && bytes > 0)
        {
            return Err(Errno::EINVAL);
        }
        if !ignores {
            device.discard_limit = Some(bytes.min(DISCARD_HARDWARE));
        }
        Ok(())
    })
}

pub(crate) fn direct_io(index: u32) -> Option<bool> {
    with(|model| model.devices.get(&index)?.bound.as_ref().map(|bound| bound.info.lo_flags & DIRECT_IO != 0))
}

pub(crate) fn stays_bound(index: u32) -> bool {
    let stays = |model: &mut LoopModel| {
        let bound = model.devices.get(&index)?.bound.as_ref()?;
        Some(bound.info.lo_flags & AUTOCLEAR == 0)
    };
    with(stays).unwrap_or(false)
}

pub(crate) fn add(control: impl AsFd, index: u32) -> Result<u32> {
    by_control(control, |model| {
        model.enter("add", Some(index))?;
        if model.devices.contains_key(&index) {
            return Err(Errno::EEXIST);
        }
        if index >= index_limit_of(model.max_part) {
            return Err(Errno::EINVAL);
        }
        model.add_idle(index);
        Ok(index)
    })
}

pub(crate) fn remove(control: impl AsFd, index: u32) -> Result<()> {
    while by_control(&control, |model| model.locked.contains(&index)) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    by_control(control, |model| {
        model.enter("remove", Some(index))?;
        let device = model.devices.get(&index).ok_or(Errno::ENODEV)?;
        if device.bound.is_some() || device.rundown || model.openers(index) > 0 {
            return Err(Errno::EBUSY);
        }
        model.devices.remove(&index);
        Ok(())
    })
}

pub(crate) fn get_free(control: impl AsFd) -> Result<u32> {
    by_control(control, |model| {
        model.enter("get_free", None)?;
        let free = model.devices.iter().find(|(_, device)| device.bound.is_none() && !device.rundown);
        let index =
            free.map_or_else(|| model.devices.keys().last().map_or(0, |last| last + 1), |(index, _)| *index);
        model.devices.entry(index).or_default();
        Ok(index)
    })
}

pub(crate) fn configure(device: impl AsFd, config: &loop_config) -> Result<()> {
    with(|model| {
        let index = model.index_of(device)?;
        model.enter("configure", Some(index))?;
        model.bind(index, config, LIBRARY)
    })
}

pub(crate) fn status(device: impl AsFd) -> Result<loop_info64> {
    with(|model| {
        let (index, info) = model.bound_of("status", device).map(|(index, bound)| (index, bound.info))?;
        if model.dead_files.contains(&index) { Err(Errno::EIO) } else { Ok(info) }
    })
}

pub(crate) fn set_status(device: impl AsFd, info: &loop_info64) -> Result<()> {
    with(|model| {
        let index = {
            let (index, bound) = model.bound_of("set_status", device)?;
            bound.info.lo_flags = info.lo_flags;
            bound.info.lo_file_name = info.lo_file_name;
            (bound.info.lo_offset, bound.info.lo_sizelimit) = (info.lo_offset, info.lo_sizelimit);
            bound.refresh();
            index
        };
        if model.forgets_discard_limits {
            model.devices.entry(index).or_default().discard_limit = None;
        }
        Ok(())
    })
}

pub(crate) fn clear(device: impl AsFd) -> Result<()> {
    with(|model| {
        let (index, bound) = model.bound_of("clear", device)?;
        if bound.owner != LIBRARY {
            model.violations.push(format!("the library detached loop{index} of another program"));
            return Ok(());
        }
        let alone = model.openers(index) == 1;
        match (alone, model.unbinds_at_last_close) {
            (true, false) => model.unbind(index),
            (true, true) => {
                model.lose_dirty(index);
                let device = model.devices.get_mut(&index).ok_or(Errno::ENXIO)?;
                (device.bound, device.rundown) = (None, true);
            }
            (false, _) => {
                let device = model.devices.get_mut(&index).ok_or(Errno::ENXIO)?;
                device.bound.as_mut().ok_or(Errno::ENXIO)?.info.lo_flags |= AUTOCLEAR;
            }
        }
        Ok(())
    })
}

pub(crate) fn set_capacity(device: impl AsFd) -> Result<()> {
    with(|model| model.bound_of("set_capacity", device).map(|(_, bound)| bound.refresh()))
}

/// Only kernel tests make this call and the next one.
pub(crate) fn set_direct_io(_device: impl AsFd, _enabled: bool) -> Result<()> {
    Err(Errno::ENOSYS)
}

pub(crate) fn set_block_size(_device: impl AsFd, _bytes: u32) -> Result<()> {
    Err(Errno::ENOSYS)
}

pub(crate) fn size(device: impl AsFd) -> Result<u64> {
    with(|model| model.bound_of("size", device).map(|(_, bound)| bound.size))
}

pub(crate) fn logical_block_size(device: impl AsFd) -> Result<u32> {
    with(|model| model.bound_of("block_size", device).map(|(_, bound)| bound.block_size))
}

pub(crate) fn disk_sequence(device: impl AsFd) -> Result<u64> {
    with(|model| {
        let index = model.index_of(device)?;
        if model.lacks_sequences { Err(Errno::EINVAL) } else { Ok(model.devices[&index].sequence) }
    })
}
