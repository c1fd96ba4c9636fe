//! What a virtual machine is made of.

use std::net::SocketAddrV4;
use std::path::PathBuf;

use super::hypervisor::Hypervisor;

/// Everything that determines QEMU's arguments. Starting the same specification again after a power cut is a reboot: disks that
/// are [`DiskMode::Persistent`] are as the cut left them.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Names the machine in messages and its files in `logs`.
    pub name: String,
    pub hypervisor: Hypervisor,
    pub kernel: PathBuf,
    /// See [`super::initramfs`].
    pub initramfs: PathBuf,
    /// Appended to the kernel command line.
    pub kernel_args: Vec<String>,
    pub memory_mib: u32,
    pub cpus: u32,
    pub disks: Vec<Disk>,
    /// Whether there is a user-mode network; the guest is 10.0.2.15, the host's loopback 10.0.2.2.
    pub network: bool,
    /// Ports of the host that reach the guest. They need `network`.
    pub forwards: Vec<Forward>,
    /// Where the console and the output of everything in the guest is kept, one file per source.
    pub logs: PathBuf,
}

/// A raw disk image, found in the guest by its name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Disk {
    /// At most 20 bytes: a virtio-blk serial number.
    pub name: String,
    pub image: PathBuf,
    pub mode: DiskMode,
}

impl Disk {
    /// Where the writes to a [`DiskMode::Logged`] disk are kept, beside its image: see
    /// [`crate::images::write_log`]. Truncated at each boot.
    #[must_use]
    pub fn write_log(&self) -> PathBuf {
        let mut path = self.image.clone().into_os_string();
        path.push(".writes");
        path.into()
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiskMode {
    /// Writes go to the image.
    Persistent,
    /// Writes go to the image, and a copy of each, in order, to [`Disk::write_log`].
    Logged,
    /// Writes are forgotten with the machine; the image can be shared.
    Scratch,
    /// The guest cannot write.
    ReadOnly,
}

/// A TCP port of the host that leads to one of the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Forward {
    /// Any address in 127.0.0.0/8, so that every machine can have the same port.
    pub host: SocketAddrV4,
    pub guest_port: u16,
}
