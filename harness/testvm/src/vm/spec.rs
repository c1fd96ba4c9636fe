//! The specification of a virtual machine.

use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};

use super::hypervisor::Hypervisor;
use crate::images::kernel::Kernel;

/// Everything that determines QEMU's arguments. Starting the same specification again after a power cut is a
/// reboot: [`DiskMode::Persistent`] disks have the content that the power cut left.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// The name of the machine in messages.
    pub name: String,
    pub hypervisor: Hypervisor,
    /// The kernel, with the faults that it may log on a machine of this name.
    pub kernel: Kernel,
    /// See [`super::initramfs`].
    pub initramfs: PathBuf,
    pub memory_mib: u32,
    pub cpus: u32,
    pub disks: Vec<Disk>,
    /// `true` for a user-mode network, in which the guest is 10.0.2.15 and the host's loopback is 10.0.2.2.
    pub network: bool,
    /// Ports of the host that are forwarded to the guest. They need `network`.
    pub forwards: Vec<Forward>,
    /// The directory of the console's log and the output of all programs in the guest, one file per source.
    pub logs: PathBuf,
}

/// A raw disk image, which the guest finds by its name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Disk {
    /// The name: at most 20 bytes, because it is a virtio-blk serial number.
    pub name: String,
    /// The path of the image on the host.
    pub image: PathBuf,
    pub mode: DiskMode,
}

impl Disk {
    /// Returns the path of the log of writes to a [`DiskMode::Logged`] disk, beside its image: see
    /// [`crate::images::write_log`]. Each boot truncates it.
    pub fn write_log(&self) -> PathBuf {
        let mut path = self.image.clone().into_os_string();
        path.push(".writes");
        path.into()
    }

    /// Returns the directory of the host in which the guest's writes take space, or `None` if it cannot write.
    pub(super) fn written_directory(&self) -> Option<PathBuf> {
        match self.mode {
            DiskMode::Persistent | DiskMode::Logged => self.image.parent().map(Path::to_owned),
            DiskMode::Scratch => Some(scratch_directory()),
            DiskMode::ReadOnly => None,
        }
    }
}

/// What happens to the guest's writes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiskMode {
    /// Writes go to the image. If it has an XFS when the machine starts, that must be consistent when the machine has ended in
    /// order.
    Persistent,
    /// As [`DiskMode::Persistent`], and a copy of each write, in order, goes to [`Disk::write_log`].
    Logged,
    /// Writes are discarded when the machine ends, so machines can share the image.
    Scratch,
    /// The guest cannot write.
    ReadOnly,
}

/// Returns the directory in which QEMU keeps the writes to [`DiskMode::Scratch`] disks, in unnamed files. It is not that of
/// other temporary files, which may be in memory.
pub(super) fn scratch_directory() -> PathBuf {
    let chosen = std::env::var_os("TMPDIR").map(PathBuf::from).filter(|path| path.is_dir());
    chosen.filter(|path| path != Path::new("/tmp")).unwrap_or_else(|| "/var/tmp".into())
}

/// A TCP port of the host that is forwarded to the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Forward {
    /// The address, which can be any in 127.0.0.0/8, so that every machine can use the same port.
    pub host: SocketAddrV4,
    /// The port of the guest.
    pub guest_port: u16,
}
