//! `/dev/loop-control`, and the search for the device of a file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::binding::{Access, BackingFile, Binding};
use super::detach::{Detach, DetachError, PendingDetach, is_unbound};
use super::device::{
    BEYOND_ALL_INDICES, CONTROL, LoopDevice, NO_NODE, NOT_ALLOWED, Status, node_name, open_device,
    read_status,
};
use super::exclusion::Exclusion;
use super::index_lock::{self, Absence, IndexLock};
use super::mounted::MAJOR;
use super::options::AttachOptions;
use super::pool::{self, Pool, PoolOptions};
use super::query::{NEEDED_TIMEOUT, query_device, query_devices, query_within};
use super::{attach, discard};
use crate::descriptor::reopen;
use crate::error::{Error, ErrorKind, Result};
use crate::flock;
use crate::sys::loop_dev;
use crate::units::DeviceNumber;

/// Attaches files to loop devices and finds the devices of files. A process needs only one.
///
/// Calls for the same file exclude each other, also between processes: each locks the file with flock(2), through a descriptor of its own.
/// If the given descriptor has the file locked exclusively, that lock counts, and stays. Leases of the caller stay, too.
///
/// # Two writable devices of one file
/// Two writable devices would corrupt a file, because each has caches of its own. [`attach`](Self::attach) and
/// [`ensure_attached`](Self::ensure_attached) therefore bind a writable device only to a file that has none, whichever program
/// bound it.
///
/// The library finds its own devices by a lock that they hold on their file. It detects a writable device of another program,
/// such as losetup(8), because that device has the file open for writing. Then it queries every device for its file, which takes
/// longer the more devices exist. A writable descriptor of the caller has the same effect in each call, so pass a descriptor that
/// is open for reading only.
///
/// The guarantee has three limits. Another program can bind a writable device to the file later, because it does not use this
/// library. If the process is neither the file's owner nor has `CAP_LEASE`, or if leases are disabled
/// (`/proc/sys/fs/leases-enable` is 0), the library does not notice a writable device that another program bound after the first
/// attachment by this library, or after the volume was created. And two processes that share one open file description with an exclusive
/// lock, because one inherited it or received it from the other, must not use it concurrently.
///
/// Read-only devices of other programs are not excluded: there may be one beside each device of this library.
///
/// A read-only device beside a writable one of the same file has a page cache of its own, and returns old data after a write. The library
/// allows it, for images that nothing writes to any more.
///
/// # Devices that untrusted programs can open
/// A process that can open a device can unbind it (`LOOP_CLR_FD`), and bind it to a file of its own; neither needs a capability. If it
/// has the device open for writing, it can change its offset, size limit, label and block size, switch direct I/O off, and make the kernel
/// scan its content for partitions. A container keeps the node of a device for as long as it runs. If the index of the device is
/// bound to another file by then, the container has access to that file.
///
/// A program that makes a device available to such processes therefore uses a control
/// [`for_untrusted_programs`](Self::for_untrusted_programs), and holds a [`LoopDevice`] of it for as long as they may run:
/// the kernel does not unbind a device that is open, it only detaches it at the last close. After a restart, it opens the devices again
/// ([`LoopDevice::open_device_number`]) before it attaches any file. It detaches a device only when none of these processes is left.
/// The pool of this [`LoopControl`] uses no index whose node is mounted in the mount namespace of the calling thread, so a
/// node that a container was given should stay mounted for as long as the container runs. A process may also have got a descriptor of
/// the device from another one (`SCM_RIGHTS`). So the pool uses an idle device again only if no process had it open when
/// this [`LoopControl`] detached it, and no process has bound it since. It removes the others, which the kernel refuses for a device
/// that is open.
/// [`restore`](LoopDevice::restore) finds and repairs what such a process has changed.
///
/// [`IndexPolicy`](super::IndexPolicy)`::Any` and `Exact`, and other programs such as losetup(8), use any index that is bound to no file.
#[derive(Debug)]
pub struct LoopControl {
    shared: Arc<SharedControl>,
    is_for_untrusted: bool,
}

/// Counts of loop devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounts {
    /// Bound to a file.
    pub attached: usize,
    /// Attached devices that use the page cache of their file.
    pub without_direct_io: usize,
}

/// The bound loop devices of the machine.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct DeviceList {
    /// The devices in the order of their indices.
    pub devices: Vec<Status>,
    /// Why other devices could not be queried. Each error names its device. A process changes the device, or the file system of its file has
    /// failed or does not respond.
    pub skipped: Vec<Error>,
}

#[derive(Debug)]
struct SharedControl {
    control: Arc<OwnedFd>,
    pool: Pool,
    removing: AtomicBool,
}

impl LoopControl {
    /// Opens `/dev/loop-control`. The first attachment looks for the idle devices of earlier processes. If the loop module is not
    /// loaded, the kernel loads it. If `/dev` is a copy, in which the kernel creates no nodes, the library creates the missing ones: this
    /// one, and `/dev/loopN` when it opens a device.
    ///
    /// # Errors
    /// ENOENT, ENODEV: the loop module cannot be loaded, or `/dev` is not the host's and the process may not create nodes there.
    /// EACCES, EPERM: the process may not open the node, for example because the device cgroup of a container denies it.
    pub fn open() -> Result<Self> {
        // First, because this loads the module, and the default range depends on a parameter of the module.
        let control = open_control()?;
        Self::new(control, PoolOptions::default())
    }

    /// Opens `/dev/loop-control` as [`open`](Self::open) does, with the given range of indices and number of idle devices.
    ///
    /// # Errors
    /// As [`open`](Self::open). [`ErrorKind::InvalidInput`]: the range has no index, or indices that the parameter `max_part` of
    /// the loop module does not allow.
    pub fn with_pool(options: PoolOptions) -> Result<Self> {
        Self::new(open_control()?, options)
    }

    fn new(control: OwnedFd, options: PoolOptions) -> Result<Self> {
        let pool = Pool::new(options)?;
        let control = Arc::new(control);
        let shared = Arc::new(SharedControl { control, pool, removing: AtomicBool::new(false) });
        Ok(Self { shared, is_for_untrusted: false })
    }

    /// Limits how long the calls for a file wait for its device, for devices that untrusted programs can open: such a program can block
    /// the calls of its device, as can a file system that does not respond. They then fail with [`ErrorKind::Busy`] after ten seconds,
    /// and [`find`](Self::find) after one. A thread makes each query, which takes about 50 µs.
    #[must_use]
    pub fn for_untrusted_programs(self) -> Self {
        Self { is_for_untrusted: true, ..self }
    }

    /// Checks that loop devices are available: `/dev/loop-control` can be opened, and the loop driver responds. Changes nothing.
    ///
    /// # Errors
    /// As [`open`](Self::open); ENOTTY: the node is not the loop driver's.
    #[doc(alias = "LOOP_CTL_REMOVE")]
    pub fn verify(&self) -> Result<()> {
        require_driver(open_control()?.as_fd())?;
        require_driver(self.shared.control.as_fd())
    }

    /// Attaches `image` to a device.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: the file is attached with this access already, by this library or
    /// ([with exceptions](Self#two-writable-devices-of-one-file)) by another program. [`ErrorKind::NotHonoured`]: the kernel did not grant a
    /// property, which the message names; the file is not attached then. [`ErrorKind::Busy`]: other programs bound every device
    /// until the deadline, or use the requested index, or one has locked the whole file for writing (fcntl(2)), or another call
    /// holds the lock of the file (flock(2)) until the deadline.
    #[doc(alias = "LOOP_CONFIGURE")]
    pub fn attach(&self, image: impl AsFd, options: &AttachOptions) -> Result<LoopDevice> {
        let image = image.as_fd();
        let locked = Exclusion::lock(image, options.deadline)?;
        match self.search(image, Some(&locked), locked.backing(), options.access)? {
            Search::None(absence) => self.bind(image, &locked, options, absence),
            Search::Found(device) => {
                let detail = format!("the file is attached already: {}", device.binding());
                Err(Error::new(ErrorKind::AlreadyExists, "attach", node_name(device.index()), detail))
            }
        }
    }

    /// Returns the device that `image` is attached to with this access. If there is none, attaches the image first. In both cases
    /// the descriptor of the device is open for writing if the access is [`ReadWrite`](Access::ReadWrite). The call can be
    /// repeated, and many processes can make it concurrently: there is one device for each access. A device that is smaller than its file
    /// gets the size of the file.
    ///
    /// The call does not cancel a deferred detach, which cannot be told from [`Lifetime::AutoClear`](super::Lifetime::AutoClear) of another
    /// user: call [`LoopDevice::cancel_detach`] for that. A device that another program has bound does not protect a volume from
    /// [`VolumeStore::delete`](crate::volume_store::VolumeStore::delete), because it has no index lock.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: the image is attached with other properties than the requested ones, or the kernel detaches the device
    /// at its last close and that was not requested. An empty label matches any. [`ErrorKind::WouldShrink`]: the file has become smaller than
    /// the device, which takes writes. Otherwise as [`attach`](Self::attach).
    #[doc(alias = "LOOP_CONFIGURE")]
    pub fn ensure_attached(&self, image: impl AsFd, options: &AttachOptions) -> Result<LoopDevice> {
        let image = image.as_fd();
        let locked = Exclusion::lock(image, options.deadline)?;
        let device = match self.search(image, Some(&locked), locked.backing(), options.access)? {
            Search::None(absence) => return self.bind(image, &locked, options, absence),
            Search::Found(device) => device,
        };
        let status = device.status()?;
        if let Some(problem) = options.conflict(&status, image)? {
            return Err(Error::new(ErrorKind::AlreadyExists, "attach", node_name(device.index()), problem));
        }
        let device = device.into_writable()?;
        // The process that expanded the file may have died before it refreshed the device.
        let shown = attach::shown_size(&status, locked.status().st_size as u64);
        // What is left of a truncated image can be read through a device that takes no writes.
        if status.size.0 < shown || status.size.0 > shown && options.access == Access::ReadWrite {
            device.refresh_capacity(image)?;
        }
        // The process that attached it may have died before it set this, and cancelling a detach may have reset it. If a kernel
        // keeps discards disabled, the device is in use and stays as it is.
        discard::set(&device, device.index(), options.discard)?;
        Ok(device)
    }

    /// Returns the devices that the file is attached to: at most one that takes writes and one that does not. Another program's
    /// writable device is found ([with exceptions](Self#two-writable-devices-of-one-file)). Its read-only device is found
    /// only until this library has attached the file.
    ///
    /// # Errors
    /// ENOENT: `/sys` is not mounted.
    pub fn find(&self, image: impl AsFd) -> Result<Vec<LoopDevice>> {
        let image = image.as_fd();
        self.search_both(image, None, BackingFile::of(image)?)
    }

    /// Detaches a device as [`LoopDevice::detach`] does. The idle device is then reused, or removed in the background.
    ///
    /// # Errors
    /// Those of [`LoopDevice::detach`], with the device.
    #[doc(alias = "LOOP_CLR_FD")]
    pub fn detach(&self, device: LoopDevice) -> Result<Detach, DetachError> {
        let index = device.index();
        let detached = device.detach_and_examine();
        match &detached {
            Ok((Detach::Detached, idle)) => self.shared.pool.release(index, *idle),
            // After an error, the kernel may detach it later.
            Ok((Detach::Deferred(_), _)) | Err(_) => self.shared.pool.release_on_close(index),
        }
        self.remove_surplus();
        detached.map(|(detach, _)| detach)
    }

    /// Detaches every device of the file. Returns [`Detach::Deferred`] if some are still open.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: another call has held the lock of the file (flock(2)) for 60 seconds. Those of
    /// [`LoopDevice::detach`]; a device that is detached already is no error.
    pub fn detach_all(&self, image: impl AsFd) -> Result<Detach> {
        let image = image.as_fd();
        let locked = Exclusion::lock(image, flock::DEFAULT_TIMEOUT)?;
        let (mut deferred, mut failed) = (Vec::new(), None);
        for device in self.search_both(image, Some(&locked), locked.backing())? {
            match self.detach(device).map_err(Error::from) {
                Ok(Detach::Deferred(pending)) => deferred.extend_from_slice(pending.bindings()),
                Ok(Detach::Detached) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                // The other device can be detached nevertheless.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(if deferred.is_empty() {
            Detach::Detached
        } else {
            Detach::Deferred(PendingDetach::new(deferred))
        })
    }

    /// Returns the status of every bound loop device of the machine, including those of other programs. Queries each device, because
    /// sysfs still names the file of a device that is being detached. Skips devices that cannot be queried.
    ///
    /// # Errors
    /// ENOENT: `/sys` is not mounted.
    pub fn list(&self) -> Result<DeviceList> {
        let mut list = DeviceList::default();
        let status = |index| open_device(index, false).and_then(|fd| read_status(fd, index));
        for (_, result) in self.query_all(move |index| if_bound(status(index)))? {
            match result {
                Ok(Some(status)) => list.devices.push(status),
                // It is idle, being detached, or removed since the listing.
                Ok(None) => {}
                Err(error) => list.skipped.push(error),
            }
        }
        Ok(list)
    }

    /// Queries every device of the machine.
    fn query_all<T: Send + 'static>(
        &self,
        query: impl Fn(u32) -> Result<T> + Clone + Send + 'static,
    ) -> Result<impl Iterator<Item = (u32, Result<T>)>> {
        let numbers = self.shared.pool.numbers();
        let devices = pool::indices()?.into_iter().map(|index| numbers.of(index)).collect();
        let queries = query_devices(devices, move |number| query(numbers.index(number)));
        Ok(queries.map(move |(number, result)| (numbers.index(number), result)))
    }

    /// Returns the counts of bound devices in the range of this [`LoopControl`]. Opens no device, so it delays no detach.
    ///
    /// # Errors
    /// ENOENT: `/sys` is not mounted.
    pub fn counts(&self) -> Result<DeviceCounts> {
        let mut counts = DeviceCounts::default();
        for index in pool::indices()?.into_iter().filter(|index| self.shared.pool.contains(*index)) {
            if let Some(direct_io) = loop_dev::direct_io(index) {
                counts.attached += 1;
                counts.without_direct_io += usize::from(!direct_io);
            }
        }
        Ok(counts)
    }

    /// Returns `true` if a device number is that of an index in the range of this [`LoopControl`].
    #[must_use]
    pub fn has(&self, number: DeviceNumber) -> bool {
        let pool = &self.shared.pool;
        number.major == MAJOR && pool.contains(pool.numbers().index(number))
    }

    /// Returns the number of idle devices in the pool.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.shared.pool.idle()
    }

    /// Removes idle devices until `keep` are left, and returns how many it removed. Also removes devices whose deferred detach is
    /// complete. Surplus devices are removed in the background anyway; this call waits for the removal, about 45 ms for each 64.
    #[doc(alias = "LOOP_CTL_REMOVE")]
    pub fn remove_idle(&self, keep: usize) -> usize {
        self.shared.pool.remove_idle(&self.shared.control, keep)
    }

    fn bind(
        &self,
        image: BorrowedFd<'_>,
        locked: &Exclusion,
        options: &AttachOptions,
        absence: Absence,
    ) -> Result<LoopDevice> {
        let SharedControl { control, pool, .. } = &*self.shared;
        let device = attach::attach(control, pool, image, locked, options, absence);
        // The pool may have found devices that other processes left idle.
        self.remove_surplus();
        device
    }

    /// Starts a thread that removes surplus idle devices, unless one is running.
    fn remove_surplus(&self) {
        if !self.shared.pool.has_surplus() || self.shared.removing.swap(true, Ordering::AcqRel) {
            return;
        }
        let removal = SurplusRemoval(Arc::clone(&self.shared));
        let run = move || {
            let shared = &removal.0;
            while shared.pool.has_surplus() {
                shared.pool.remove_idle(&shared.control, shared.pool.keep_idle());
            }
        };
        // If no thread can be created, the devices stay until the next call.
        std::thread::Builder::new().name("loop-remove".to_owned()).spawn(run).ok();
    }

    /// Opens a device that an index lock names, as [`open_if_bound`] does. If the device exists and its node is missing, the call fails
    /// instead of returning `None`: a second writable device would corrupt the file.
    fn open_named_by_lock(&self, index: u32, is_needed: bool) -> Result<Option<LoopDevice>> {
        let open = move |_| match LoopDevice::open_index(index) {
            Err(error) if error.errno() == Some(Errno::ENOENT as i32) && loop_dev::exists(index) => {
                Err(error.explain(NO_NODE))
            }
            opened => if_bound(opened),
        };
        let number = self.shared.pool.number_of(index);
        if !self.is_for_untrusted {
            open(number)
        } else if is_needed {
            query_within(NEEDED_TIMEOUT, number, open)
        } else {
            // A list of volumes goes on with the next one soon.
            query_device(number, open)
        }
    }

    /// Searches for the devices of a file, of both kinds of access.
    fn search_both(
        &self,
        image: BorrowedFd<'_>,
        locked: Option<&Exclusion>,
        backing: BackingFile,
    ) -> Result<Vec<LoopDevice>> {
        let mut found = Vec::new();
        for access in [Access::ReadWrite, Access::ReadOnly] {
            if let Search::Found(device) = self.search(image, locked, backing, access)? {
                found.push(device);
            }
        }
        Ok(found)
    }

    /// Searches for the device of a file. `locked` has an open file description of the file that the caller of the library does not have.
    fn search(
        &self,
        image: BorrowedFd<'_>,
        locked: Option<&Exclusion>,
        backing: BackingFile,
        access: Access,
    ) -> Result<Search> {
        let wanted = |binding: &Binding| binding.backing == backing && binding.access == access;
        let lock = index_lock::read(image, access);
        if let IndexLock::Index(index) = lock
            && let Some(device) =
                self.open_named_by_lock(index, locked.is_some())?.filter(|device| wanted(device.binding()))
        {
            return Ok(Search::Found(device));
        }
        // A lease of the caller's open file description would end with this one.
        let writer = match locked {
            _ if access == Access::ReadOnly => None,
            Some(locked) => index_lock::writer(locked, access),
            None => match reopen(image, OFlag::O_RDONLY | OFlag::O_NONBLOCK) {
                Ok(own) => index_lock::writer(own, access),
                Err(_) => None,
            },
        };
        if writer == Some(false) {
            return Ok(Search::None(Absence::NoWriter));
        }
        // A writer may be a device of another program.
        if lock == IndexLock::NoLock && writer.is_none() && index_lock::is_tracked(image, access) {
            return Ok(Search::None(Absence::Tracked));
        }
        for (index, result) in self.query_all(open_if_bound)? {
            match result {
                Ok(Some(device)) if wanted(device.binding()) => return Ok(Search::Found(device)),
                Ok(_) => {}
                // A second writable device would corrupt the file.
                Err(error) if may_be_bound_to(index, image) => {
                    if error.kind() != ErrorKind::Busy {
                        return Err(error);
                    }
                    let number = self.shared.pool.number_of(index);
                    let device = query_within(NEEDED_TIMEOUT, number, move |_| open_if_bound(index))?;
                    if let Some(device) = device.filter(|device| wanted(device.binding())) {
                        return Ok(Search::Found(device));
                    }
                }
                Err(_) => {}
            }
        }
        Ok(Search::None(Absence::Scanned))
    }
}

/// The result of a search for the device of a file with one access.
enum Search {
    Found(LoopDevice),
    None(Absence),
}

/// The running removal of surplus devices. Dropping it allows the next one, also after a panic.
struct SurplusRemoval(Arc<SharedControl>);

impl Drop for SurplusRemoval {
    fn drop(&mut self) {
        self.0.removing.store(false, Ordering::Release);
    }
}

/// What to do if the loop driver does not respond.
const REMEDY: &str = "load the loop module (modprobe loop), and let this process see the host's /dev";

fn open_control() -> Result<OwnedFd> {
    loop_dev::open_control().map_err(|errno| match errno {
        Errno::ENOENT | Errno::ENODEV => Error::sys("open", CONTROL, errno).with_remedy(REMEDY),
        Errno::EPERM => Error::sys("open", CONTROL, errno).explain(NOT_ALLOWED),
        _ => Error::sys("open", CONTROL, errno),
    })
}

/// Checks that the loop driver responds: requests the removal of a device that cannot exist, the only request of the driver that
/// changes nothing. The driver returns ENODEV.
fn require_driver(control: BorrowedFd<'_>) -> Result<()> {
    match loop_dev::remove(control, BEYOND_ALL_INDICES) {
        Ok(()) | Err(Errno::ENODEV) => Ok(()),
        Err(errno) => Err(Error::sys("query", CONTROL, errno).with_remedy(REMEDY)),
    }
}

/// Opens a device. Returns `None` if it is not bound, or does not exist.
fn open_if_bound(index: u32) -> Result<Option<LoopDevice>> {
    if_bound(LoopDevice::open_index(index))
}

/// Returns `true` if a device that cannot be queried may be bound to a file: sysfs has a file of the same name. A tenant can choose
/// that name, but only keeps its own volume from others by that.
fn may_be_bound_to(index: u32, image: BorrowedFd<'_>) -> bool {
    let Ok(bound) = loop_dev::attribute_bytes(index, "loop/backing_file") else { return false };
    let bound = bound.strip_suffix(b" (deleted)").unwrap_or(&bound);
    let name_of = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().map(<[u8]>::to_vec);
    match std::fs::read_link(format!("/proc/self/fd/{}", image.as_raw_fd())) {
        Ok(path) => {
            let path = path.into_os_string().into_vec();
            name_of(path.strip_suffix(b" (deleted)").unwrap_or(&path)) == name_of(bound)
        }
        // Without /proc the name of the file is unknown.
        Err(_) => true,
    }
}

fn if_bound<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Ok(device) => Ok(Some(device)),
        Err(error) if is_unbound(&error) => Ok(None),
        Err(error) => Err(error),
    }
}
