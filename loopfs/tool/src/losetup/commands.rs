//! The actions of losetup(8).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Error as IoError;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use loopfs::loop_device::unmanaged::{self, Attributes, Device, Setup};
use loopfs::loop_device::{Access, BackingFile, BackingRange, LoopDevice};
use loopfs::{DeviceNumber, Result};
use nix::fcntl::OFlag;

use super::arguments::{LosetupAction, LosetupRequest};
use super::columns::{self, Row};
use super::failure::{LosetupFailure, os_text};
use super::help;
use super::stored::devices_of;

/// Attempts to bind a free device that other processes bind first, and the pause between them.
const ATTEMPTS: u32 = 64;
const PAUSE: Duration = Duration::from_millis(200);
/// udev may not yet have created the node, or set its owner.
const NODE_ATTEMPTS: u32 = 16;
const NODE_PAUSE: Duration = Duration::from_millis(25);

/// What a command prints, and whether it failed.
#[derive(Debug, Default)]
pub(crate) struct LosetupOutcome {
    pub(crate) stdout: Vec<u8>,
    pub(crate) warnings: Vec<LosetupFailure>,
    pub(crate) failed: bool,
}

impl LosetupOutcome {
    fn print(text: impl Into<Vec<u8>>) -> Self {
        Self { stdout: text.into(), ..Self::default() }
    }

    fn fail(&mut self, failure: LosetupFailure) {
        self.warnings.push(failure);
        self.failed = true;
    }
}

/// Runs the action.
pub(crate) fn run(request: &LosetupRequest) -> std::result::Result<LosetupOutcome, LosetupFailure> {
    match &request.action {
        LosetupAction::Help => Ok(LosetupOutcome::print(help::text())),
        LosetupAction::Version => Ok(LosetupOutcome::print(help::version())),
        LosetupAction::Create { device, file } => create(request, device.as_deref(), file),
        LosetupAction::Detach(devices) => Ok(for_each(devices, "detach failed", detach)),
        LosetupAction::DetachAll => {
            let bound = unmanaged::bound_indices()
                .map_err(|error| LosetupFailure::of("cannot list the devices", &error))?;
            let devices: Vec<OsString> = bound.iter().map(|index| format!("loop{index}").into()).collect();
            Ok(for_each(&devices, "detach failed", detach))
        }
        LosetupAction::Remove(devices) => Ok(for_each(devices, "remove failed", remove)),
        LosetupAction::Show(file) => show(request, file.as_deref()),
        LosetupAction::ShowOne(device) => show_one(request, device),
        LosetupAction::FindFree => {
            let index = find_free()?;
            let name = format!("/dev/loop{index}");
            let lost = if Path::new(&name).exists() { "" } else { " (lost)" };
            Ok(LosetupOutcome::print(format!("{name}{lost}\n")))
        }
        LosetupAction::SetCapacity(device) => {
            Ok(change(device, "set capacity failed", Device::refresh_capacity))
        }
        LosetupAction::SetDirectIo(device, enabled) => {
            Ok(change(device, "set direct io failed", |device| device.set_direct_io(*enabled)))
        }
        LosetupAction::SetBlockSize(device, size) => {
            let size = block_size(*size);
            Ok(change(device, "set logical block size failed", |device| device.set_block_size(size)))
        }
    }
}

/// Returns the block size for the kernel, which refuses those that do not fit, as it refuses the largest number.
fn block_size(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Returns the path of a device: names without a slash at the start are relative to `/dev`.
fn path_of(device: &OsStr) -> PathBuf {
    Path::new("/dev").join(device)
}

/// Runs a call for each device, and continues after a failure.
fn for_each(devices: &[OsString], failure: &str, call: impl Fn(&Path) -> Result<()>) -> LosetupOutcome {
    let mut outcome = LosetupOutcome::default();
    for device in devices {
        let path = path_of(device);
        if let Err(error) = call(&path) {
            outcome.fail(LosetupFailure::of(format!("{}: {failure}", path.display()), &error));
            outcome.warnings.extend(lost(&path));
        }
    }
    outcome
}

/// Runs a call for one device.
fn change(device: &OsString, failure: &str, call: impl Fn(&Device) -> Result<()>) -> LosetupOutcome {
    for_each(std::slice::from_ref(device), failure, |path| call(&Device::open_path(path, Access::ReadOnly)?))
}

/// Returns a warning if the kernel has the device but its node does not exist.
fn lost(path: &Path) -> Option<LosetupFailure> {
    if path.exists() {
        return None;
    }
    let name = path.file_name()?.to_str()?;
    let number = std::fs::read_to_string(format!("/sys/block/{name}/dev")).ok()?;
    let (path, number) = (path.display(), number.trim_end());
    Some(LosetupFailure::message(format!(
        "device node {path} ({number}) is lost. You may use mknod(1) to recover it."
    )))
}

fn detach(path: &Path) -> Result<()> {
    Device::open_path(path, Access::ReadOnly)?.detach()
}

fn remove(path: &Path) -> Result<()> {
    // A node at another path belongs to a device too, for instance one that a pod uses.
    match index_in(path).or_else(|| unmanaged::index_of(path)) {
        Some(index) => unmanaged::remove(index),
        // Not a loop device: the error says what the path is.
        None => LoopDevice::open_path(path).and_then(|device| unmanaged::remove(device.index())),
    }
}

/// Returns N of `/dev/loopN`, whether or not the device exists. Returns `None` for other spellings of the number, such as `+7` and
/// `07`: the kernel gives no node such a name.
fn index_in(path: &Path) -> Option<u32> {
    let text = path.strip_prefix("/dev").ok()?.to_str()?.strip_prefix("loop")?;
    text.parse().ok().filter(|index: &u32| index.to_string() == text)
}

fn row_of(index: u32) -> Row {
    let name = format!("/dev/loop{index}");
    let number = std::fs::read_to_string(format!("/sys/block/loop{index}/dev")).ok();
    Row {
        lost: !Path::new(&name).exists(),
        name,
        number: number.and_then(|number| number.trim_end().parse().ok()),
        attributes: unmanaged::attributes(index),
    }
}

fn show(
    request: &LosetupRequest,
    file: Option<&OsStr>,
) -> std::result::Result<LosetupOutcome, LosetupFailure> {
    let failed = |error: loopfs::Error| LosetupFailure::of("cannot list the devices", &error);
    let rows: Vec<Row> = match file.map(|file| (file, std::fs::metadata(file))) {
        None => unmanaged::bound_indices().map_err(failed)?.into_iter().map(row_of).collect(),
        Some((_, Ok(status))) => {
            devices_of(&identity_of(&status)).map_err(failed)?.into_iter().map(row_of).collect()
        }
        // The file cannot be identified, so its path has to do.
        Some((file, Err(_))) => {
            let all = unmanaged::bound_indices().map_err(failed)?.into_iter().map(row_of);
            all.filter(|row| row.attributes.backing_path.as_deref() == Some(Path::new(file))).collect()
        }
    };
    let selected = |row: &Row| request.offset.is_none() || row.attributes.offset == request.offset;
    // A device may have been detached in the meantime.
    let bound = |row: &Row| row.attributes.backing_path.is_some();
    let rows: Vec<Row> = rows.into_iter().filter(selected).filter(bound).collect();
    Ok(LosetupOutcome::print(match &request.columns {
        Some(columns) => columns::list(&rows, columns, request.format, locale_is_utf8()),
        None => rows.iter().filter_map(Row::line).flatten().collect(),
    }))
}

fn show_one(request: &LosetupRequest, device: &OsStr) -> std::result::Result<LosetupOutcome, LosetupFailure> {
    let path = path_of(device);
    let status = std::fs::metadata(&path).ok().filter(|status| status.file_type().is_block_device());
    let attributes = unmanaged::index_of(&path).map_or_else(Attributes::default, unmanaged::attributes);
    let row = Row {
        name: path.display().to_string(),
        number: status.map(|status| DeviceNumber::from_raw(status.rdev())),
        lost: false,
        attributes,
    };
    match &request.columns {
        Some(columns) => {
            Ok(LosetupOutcome::print(columns::list(&[row], columns, request.format, locale_is_utf8())))
        }
        None => match row.line() {
            Some(line) => Ok(LosetupOutcome::print(line)),
            None => Err(LosetupFailure::os(row.name, libc::ENOENT)),
        },
    }
}

fn identity_of(status: &std::fs::Metadata) -> BackingFile {
    BackingFile { device: DeviceNumber::from_raw(status.dev()), inode: status.ino() }
}

fn locale_is_utf8() -> bool {
    let set =
        ["LC_ALL", "LC_CTYPE", "LANG"].iter().filter_map(std::env::var_os).find(|value| !value.is_empty());
    set.is_some_and(|locale| {
        let locale = locale.to_string_lossy().to_ascii_lowercase();
        locale.contains("utf-8") || locale.contains("utf8")
    })
}

fn find_free() -> std::result::Result<u32, LosetupFailure> {
    unmanaged::find_free().map_err(|error| LosetupFailure::of("cannot find an unused loop device", &error))
}

fn create(
    request: &LosetupRequest,
    device: Option<&OsStr>,
    file: &OsStr,
) -> std::result::Result<LosetupOutcome, LosetupFailure> {
    let device = device.map(path_of);
    let shown = os_text(file);
    let bound = match reusable(request, device.is_some(), file)? {
        Some(index) => PathBuf::from(format!("/dev/loop{index}")),
        None => bind(request, device.as_deref(), file)?,
    };
    let mut outcome = LosetupOutcome::default();
    if request.show {
        outcome.stdout = [bound.as_os_str().as_bytes(), b"\n"].concat();
    }
    outcome
        .warnings
        .extend(size_warning(request, file).map(|text| LosetupFailure::message(format!("{shown}: {text}"))));
    Ok(outcome)
}

/// Returns the device with the requested offset and size limit, which `--nooverlap` uses again. Returns an error if a device maps
/// another range of the file that overlaps the requested one.
fn reusable(
    request: &LosetupRequest,
    has_device: bool,
    file: &OsStr,
) -> std::result::Result<Option<u32>, LosetupFailure> {
    let Ok(status) = std::fs::metadata(file) else { return Ok(None) };
    if !request.no_overlap {
        return Ok(None);
    }
    let shown = os_text(file);
    let found = devices_of(&identity_of(&status))
        .map_err(|error| LosetupFailure::of("failed to inspect loop devices", &error))?;
    let wanted = (request.offset.unwrap_or(0), request.size_limit.map_or(0, std::num::NonZeroU64::get));
    for index in found {
        let attributes = unmanaged::attributes(index);
        let (Some(offset), Some(size_limit)) = (attributes.offset, attributes.size_limit) else { continue };
        if !overlap(wanted, (offset, size_limit)) {
            continue;
        }
        if has_device || wanted != (offset, size_limit) {
            return Err(LosetupFailure::message(format!("{shown}: overlapping loop device exists")));
        }
        if attributes.read_only && !request.read_only {
            return Err(LosetupFailure::message(format!(
                "{shown}: overlapping read-only loop device exists"
            )));
        }
        // The device must not go away at its last close.
        Device::open_index(index, Access::ReadOnly)
            .and_then(|device| device.cancel_detach())
            .map_err(|_refused| LosetupFailure::message(format!("{shown}: failed to re-use loop device")))?;
        return Ok(Some(index));
    }
    Ok(None)
}

/// Returns `true` if two ranges of a file, given as offset and size limit, overlap. Size limit 0 extends a range to the end of
/// the file.
fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    let end = |(offset, size_limit): (u64, u64)| match size_limit {
        0 => u64::MAX,
        _ => offset.saturating_add(size_limit),
    };
    one.0 < end(other) && other.0 < end(one)
}

/// Binds the file to the given device, or to a free one, and returns the path of the device.
fn bind(
    request: &LosetupRequest,
    device: Option<&Path>,
    file: &OsStr,
) -> std::result::Result<PathBuf, LosetupFailure> {
    let path = std::fs::canonicalize(file).unwrap_or_else(|_missing| file.into());
    let failed = |object: &OsStr, errno| {
        LosetupFailure::os(format!("{}: failed to set up loop device", os_text(object)), errno)
    };
    let opened = open_file(request, &path);
    let (opened, access) = opened.map_err(|error| {
        let object = device.map_or(file, Path::as_os_str);
        failed(object, error.raw_os_error().unwrap_or(libc::EIO))
    })?;
    let setup = Setup {
        access,
        range: BackingRange { offset: request.offset.unwrap_or(0), size_limit: request.size_limit },
        block_size: request.block_size.map(block_size),
        direct_io: request.direct_io,
        partition_scan: request.partition_scan,
        name: request.name.clone().unwrap_or_else(|| path.clone().into_os_string()),
    };
    if let Some(device) = device {
        // If the device exists already, this has no effect.
        index_in(device).map(|index| unmanaged::add(index).ok());
        let node = open_node(device).map_err(|errno| failed(device.as_os_str(), errno))?;
        node.set_up(opened.as_fd(), &setup).map_err(|error| failed(file, errno_of(&error)))?;
        return Ok(device.to_owned());
    }
    let mut attempt = 0;
    loop {
        let free = PathBuf::from(format!("/dev/loop{}", find_free()?));
        let bound = open_node(&free)
            .and_then(|node| node.set_up(opened.as_fd(), &setup).map_err(|error| errno_of(&error)));
        attempt += 1;
        match bound {
            Ok(()) => return Ok(free),
            // Another process was first. ENXIO: the device is still being detached.
            Err(libc::EBUSY | libc::EAGAIN | libc::ENXIO) if attempt < ATTEMPTS => std::thread::sleep(PAUSE),
            Err(errno) => return Err(failed(file, errno)),
        }
    }
}

fn errno_of(error: &loopfs::Error) -> i32 {
    error.errno().unwrap_or(libc::EIO)
}

/// Opens the file for writing too, or for reading if it cannot be written.
fn open_file(request: &LosetupRequest, path: &Path) -> std::result::Result<(File, Access), IoError> {
    let flags = if request.direct_io { OFlag::O_DIRECT.bits() } else { 0 };
    let open = |write: bool| File::options().read(true).write(write).custom_flags(flags).open(path);
    if !request.read_only {
        match open(true) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EROFS | libc::EACCES)) => {}
            opened => return opened.map(|file| (file, Access::ReadWrite)),
        }
    }
    open(false).map(|file| (file, Access::ReadOnly))
}

/// Opens a node for writing, because udev probes a device when a writer closes it.
fn open_node(path: &Path) -> std::result::Result<Device, i32> {
    let mut attempt = 0;
    loop {
        // By its index, the library creates the node if `/dev` is a copy, in which the kernel creates none.
        let opened = match index_in(path) {
            Some(index) => Device::open_index(index, Access::ReadWrite),
            None => Device::open_path(path, Access::ReadWrite),
        };
        let errno = match opened {
            Ok(device) => return Ok(device),
            Err(error) => errno_of(&error),
        };
        let not_ready = matches!(errno, libc::ENOENT | libc::EACCES);
        attempt += 1;
        if !not_ready || index_in(path).is_none() || attempt == NODE_ATTEMPTS {
            return Err(errno);
        }
        std::thread::sleep(NODE_PAUSE);
    }
}

fn size_warning(request: &LosetupRequest, file: &OsStr) -> Option<&'static str> {
    let size = match request.size_limit {
        Some(limit) => limit.get(),
        None => {
            let status =
                std::fs::metadata(file).ok().filter(|status| !status.file_type().is_block_device())?;
            status.len().wrapping_sub(request.offset.unwrap_or(0))
        }
    };
    if size < 512 {
        return Some(
            "Warning: file is smaller than 512 bytes; the loop device may be useless or invisible for system tools.",
        );
    }
    let cut = "Warning: file does not end on a 512-byte sector boundary; the remaining end of the file will be ignored.";
    (!size.is_multiple_of(512)).then_some(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_intersecting_ranges_overlap() {
        assert!(overlap((0, 0), (4096, 512)));
        assert!(overlap((0, 4097), (4096, 0)));
        assert!(!overlap((0, 4096), (4096, 0)));
        assert!(!overlap((8192, 0), (4096, 4096)));
    }

    #[test]
    fn device_names_are_relative_to_dev() {
        assert_eq!(path_of("loop7".as_ref()), Path::new("/dev/loop7"));
        assert_eq!(path_of("/srv/node".as_ref()), Path::new("/srv/node"));
        assert_eq!(index_in(Path::new("/dev/loop7")), Some(7));
        for other in ["/srv/loop7", "/dev/loop+7", "/dev/loop07", "/dev/loop", "/dev/loop7p1"] {
            assert_eq!(index_in(Path::new(other)), None, "{other}");
        }
    }
}
