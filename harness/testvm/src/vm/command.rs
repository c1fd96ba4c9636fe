//! The QEMU command line of a specification.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use testvm_guest::control::CONTROL_PORT;
use testvm_guest::report::REPORT_PORT;

use super::monitor::device_name;
use super::spec::{Disk, DiskMode, Forward, VmSpec};

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

/// Returns the arguments of `qemu-system-x86_64`.
pub(super) fn arguments(spec: &VmSpec, sockets: &Path) -> Vec<OsString> {
    let mut args = Arguments::default();
    args.flag("-name").value(&spec.name);
    // The machine has only the devices listed below, and a reset or panic ends the process.
    for flag in ["-nodefaults", "-no-user-config", "-no-reboot"] {
        args.flag(flag);
    }
    args.flag("-display").value("none");
    // q35 reaches PID 1 half a second later than microvm. But microvm has a single clock source, and a busy
    // host makes the kernel reject it.
    args.flag("-M").value("q35");
    for (flag, value) in spec.hypervisor.accelerator.arguments() {
        args.flag(flag).value(value);
    }
    args.flag("-smp").value(spec.cpus.to_string());
    args.flag("-m").value(spec.memory_mib.to_string());
    args.flag("-kernel").value(spec.kernel.vmlinuz());
    args.flag("-initrd").value(&spec.initramfs);
    args.flag("-append").value(KERNEL_ARGS);

    args.socket(CONSOLE_SOCKET, sockets);
    args.flag("-serial").value(format!("chardev:{CONSOLE_SOCKET}"));
    args.flag("-device").value("virtio-serial-pci,id=ports");
    for (socket, port) in [(REPORT_SOCKET, REPORT_PORT), (CONTROL_SOCKET, CONTROL_PORT)] {
        args.socket(socket, sockets);
        args.flag("-device").value(format!("virtserialport,bus=ports.0,chardev={socket},name={port}"));
    }
    args.socket(MONITOR_SOCKET, sockets);
    args.flag("-mon").value(format!("chardev={MONITOR_SOCKET},mode=control"));
    args.flag("-device").value("virtio-rng-pci");
    for (index, disk) in spec.disks.iter().enumerate() {
        args.disk(index, disk);
    }
    if spec.network {
        args.flag("-netdev").value(network(&spec.forwards));
        args.flag("-device").value("virtio-net-pci,netdev=net0,romfile=");
    }
    args.0
}

fn network(forwards: &[Forward]) -> String {
    let mut value = String::from("user,id=net0");
    for Forward { host, guest_port } in forwards {
        value.push_str(&format!(",hostfwd=tcp:{}:{}-:{guest_port}", host.ip(), host.port()));
    }
    value
}

#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn flag(&mut self, flag: &str) -> &mut Arguments {
        self.value(flag)
    }

    fn value(&mut self, value: impl AsRef<OsStr>) -> &mut Arguments {
        self.0.push(value.as_ref().to_owned());
        self
    }

    /// Adds a channel that works from the start: this process listens before QEMU runs and connects.
    fn socket(&mut self, name: &str, directory: &Path) {
        let mut value = OsString::from(format!("socket,id={name},server=off,path="));
        value.push(escape(&directory.join(name)));
        self.flag("-chardev").value(value);
    }

    fn disk(&mut self, index: usize, disk: &Disk) {
        let name = device_name(index);
        let mut device = format!("virtio-blk-pci,drive={name},serial={}", disk.name);
        match disk.mode {
            DiskMode::Logged => {
                self.recorded(&name, disk);
                // QEMU merges adjacent requests up to 1024 buffers, the most that pwritev(2) accepts. The log
                // adds a header, so a merged write of 1024 buffers would fail with EINVAL, and the guest
                // would see an I/O error.
                device.push_str(",request-merging=off");
            }
            DiskMode::Persistent => self.drive(&name, disk, ""),
            DiskMode::Scratch => self.drive(&name, disk, ",snapshot=on"),
            DiskMode::ReadOnly => self.drive(&name, disk, ",readonly=on"),
        }
        self.flag("-device").value(device);
    }

    fn drive(&mut self, name: &str, disk: &Disk, more: &str) {
        // A flush need not reach the host's disk: a simulated power cut ends QEMU, not the host.
        let mut drive = OsString::from(format!("id={name},if=none,format=raw,cache=unsafe,discard=unmap"));
        drive.push(more);
        drive.push(",file=");
        drive.push(escape(&disk.image));
        self.flag("-drive").value(drive);
    }

    /// Adds a disk with a write log. The guest's flushes are logged and need not reach the host's disk.
    fn recorded(&mut self, name: &str, disk: &Disk) {
        let log = disk.write_log();
        for (node, path) in [("image", &disk.image), ("log", &log)] {
            let mut file = OsString::from(format!(
                "driver=file,node-name={name}-{node},cache.no-flush=on,discard=unmap,filename="
            ));
            file.push(escape(path));
            self.flag("-blockdev").value(file);
        }
        self.flag("-blockdev")
            .value(format!("driver=blklogwrites,node-name={name},file={name}-image,log={name}-log"));
    }
}

/// Escapes a path for QEMU's option lists: commas separate options, so a comma is doubled.
fn escape(path: &Path) -> OsString {
    let mut bytes = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        bytes.push(*byte);
        if *byte == b',' {
            bytes.push(b',');
        }
    }
    OsStr::from_bytes(&bytes).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comma_in_path_is_doubled() {
        assert_eq!(escape(Path::new("/d/a,b.ext4")), "/d/a,,b.ext4");
    }
}
