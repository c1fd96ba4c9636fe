//! The QEMU command line of a specification.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use testvm_guest::control::CONTROL_PORT;
use testvm_guest::report::REPORT_PORT;

use super::monitor::device_name;
use super::spec::{Disk, DiskMode, Forward, VmSpec};
use crate::process::Program;

/// The file names of the sockets that QEMU connects to, in a directory of the machine's own.
pub(super) const CONSOLE_SOCKET: &str = "console";
pub(super) const REPORT_SOCKET: &str = "report";
pub(super) const CONTROL_SOCKET: &str = "control";
pub(super) const MONITOR_SOCKET: &str = "monitor";

/// The console shows lines of the severity notice and above, so all lines about faults. The kernel panics at the first oops,
/// so that no output follows the cause, and QEMU exits instead of rebooting. The watchdogs' limits are long because the host
/// may be busy. For the same reason the kernel does not check that the timer ticks in time: a kernel that misses a few of its
/// ticks panics early in its boot. The magic SysRq shows why a boot hangs.
const KERNEL_ARGS: &str = "console=ttyS0 loglevel=6 panic=-1 oops=panic no_timer_check watchdog_thresh=60 \
                           rcupdate.rcu_cpu_stall_timeout=120 sysrq_always_enabled";

/// Adds the arguments of `qemu-system-x86_64`.
pub(super) fn with_arguments(qemu: Program, spec: &VmSpec, sockets: &Path) -> Program {
    // A channel works from the start: this process listens before QEMU runs and connects.
    let socket = |qemu: Program, name: &str| {
        let value = format!("socket,id={name},server=off,path=");
        qemu.arg("-chardev").arg(with_path(value, &sockets.join(name)))
    };
    // The machine has only the devices listed below, and a reset or panic ends the process.
    let qemu = qemu
        .args(["-name", &spec.name, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
        // q35 reaches PID 1 half a second later than microvm. But microvm has a single clock source, and a busy
        // host makes the kernel reject it.
        .args(["-M", "q35"])
        .args(spec.hypervisor.accelerator.arguments())
        .args(["-smp", &spec.cpus.to_string(), "-m", &spec.memory_mib.to_string(), "-append", KERNEL_ARGS])
        .arg("-kernel")
        .arg(spec.kernel.vmlinuz())
        .arg("-initrd")
        .arg(&spec.initramfs);
    let mut qemu = socket(qemu, CONSOLE_SOCKET).args([
        "-serial",
        &format!("chardev:{CONSOLE_SOCKET}"),
        "-device",
        "virtio-serial-pci,id=ports",
    ]);
    for (name, port) in [(REPORT_SOCKET, REPORT_PORT), (CONTROL_SOCKET, CONTROL_PORT)] {
        let device = format!("virtserialport,bus=ports.0,chardev={name},name={port}");
        qemu = socket(qemu, name).args(["-device", &device]);
    }
    qemu = socket(qemu, MONITOR_SOCKET).args([
        "-mon",
        &format!("chardev={MONITOR_SOCKET},mode=control"),
        "-device",
        "virtio-rng-pci",
    ]);
    for (index, disk) in spec.disks.iter().enumerate() {
        qemu = with_disk(qemu, &device_name(index), disk);
    }
    if spec.network {
        let forward = |Forward { host, guest_port }: &Forward| {
            format!(",hostfwd=tcp:{}:{}-:{guest_port}", host.ip(), host.port())
        };
        let network = format!("user,id=net0{}", spec.forwards.iter().map(forward).collect::<String>());
        qemu = qemu.args(["-netdev", &network, "-device", "virtio-net-pci,netdev=net0,romfile="]);
    }
    qemu
}

fn with_disk(qemu: Program, name: &str, disk: &Disk) -> Program {
    let device = format!("virtio-blk-pci,drive={name},serial={}", disk.name);
    let options = match disk.mode {
        DiskMode::Logged => {
            // QEMU merges adjacent requests up to 1024 buffers, the most that pwritev(2) accepts. The log
            // adds a header, so a merged write of 1024 buffers would fail with EINVAL, and the guest
            // would see an I/O error.
            let device = format!("{device},request-merging=off");
            return with_write_log(qemu, name, disk).args(["-device", &device]);
        }
        DiskMode::Persistent => "",
        DiskMode::Scratch => ",snapshot=on",
        DiskMode::ReadOnly => ",readonly=on",
    };
    // A flush need not reach the host's disk: a simulated power cut ends QEMU, not the host.
    let drive = format!("id={name},if=none,format=raw,cache=unsafe,discard=unmap{options},file=");
    qemu.arg("-drive").arg(with_path(drive, &disk.image)).args(["-device", &device])
}

/// Adds the nodes of a disk with a write log. The guest's flushes are logged and need not reach the host's disk.
fn with_write_log(mut qemu: Program, name: &str, disk: &Disk) -> Program {
    for (node, path) in [("image", &disk.image), ("log", &disk.write_log())] {
        let file = format!("driver=file,node-name={name}-{node},cache.no-flush=on,discard=unmap,filename=");
        qemu = qemu.arg("-blockdev").arg(with_path(file, path));
    }
    let log = format!("driver=blklogwrites,node-name={name},file={name}-image,log={name}-log");
    qemu.args(["-blockdev", &log])
}

/// Appends a path to an option of QEMU, in which commas separate values, so a comma is doubled.
fn with_path(option: String, path: &Path) -> OsString {
    let mut bytes = option.into_bytes();
    for byte in path.as_os_str().as_bytes() {
        bytes.extend(if *byte == b',' { b",,".as_slice() } else { std::slice::from_ref(byte) });
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comma_in_path_is_doubled() {
        assert_eq!(with_path("file=".to_owned(), Path::new("/d/a,b.ext4")), "file=/d/a,,b.ext4");
    }
}
