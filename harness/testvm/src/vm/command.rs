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
    args.flag("-append").value(kernel_command_line(&spec.kernel_args));

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

fn kernel_command_line(more: &[String]) -> String {
    std::iter::once(KERNEL_ARGS).chain(more.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
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
    use std::net::{Ipv4Addr, SocketAddrV4};

    use super::*;
    use crate::images::kernel::Kernel;
    use crate::images::qemu::Qemu;
    use crate::vm::hypervisor::{Accelerator, Hypervisor};

    fn spec() -> VmSpec {
        VmSpec {
            name: "node-1".to_owned(),
            hypervisor: Hypervisor { qemu: Qemu::at(Path::new("/qemu")), accelerator: Accelerator::Tcg },
            kernel: Kernel::at(Path::new("/k")),
            initramfs: "/run/initramfs".into(),
            kernel_args: vec!["quiet".to_owned()],
            memory_mib: 2048,
            cpus: 2,
            disks: vec![
                Disk { name: "root".to_owned(), image: "/d/a,b.ext4".into(), mode: DiskMode::Scratch },
                Disk { name: "data".to_owned(), image: "/d/data.xfs".into(), mode: DiskMode::Persistent },
                Disk { name: "cut".to_owned(), image: "/d/cut".into(), mode: DiskMode::Logged },
            ],
            network: true,
            forwards: vec![Forward {
                host: SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 9), 10250),
                guest_port: 10250,
            }],
            logs: "/logs".into(),
        }
    }

    fn words(spec: &VmSpec) -> Vec<String> {
        arguments(spec, Path::new("/s")).into_iter().map(|arg| arg.into_string().unwrap()).collect()
    }

    fn values(words: &[String], flag: &str) -> Vec<String> {
        words.windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1].clone()).collect()
    }

    #[test]
    fn a_specification_becomes_the_whole_command_line() {
        let text = words(&spec()).join("\n");
        let expected = "\
-name
node-1
-nodefaults
-no-user-config
-no-reboot
-display
none
-M
q35
-accel
tcg,thread=multi
-cpu
max
-smp
2
-m
2048
-kernel
/k/vmlinuz
-initrd
/run/initramfs
-append
console=ttyS0 loglevel=6 panic=-1 oops=panic no_timer_check watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120 sysrq_always_enabled quiet
-chardev
socket,id=console,server=off,path=/s/console
-serial
chardev:console
-device
virtio-serial-pci,id=ports
-chardev
socket,id=report,server=off,path=/s/report
-device
virtserialport,bus=ports.0,chardev=report,name=testvm.report
-chardev
socket,id=control,server=off,path=/s/control
-device
virtserialport,bus=ports.0,chardev=control,name=testvm.control
-chardev
socket,id=monitor,server=off,path=/s/monitor
-mon
chardev=monitor,mode=control
-device
virtio-rng-pci
-drive
id=disk0,if=none,format=raw,cache=unsafe,discard=unmap,snapshot=on,file=/d/a,,b.ext4
-device
virtio-blk-pci,drive=disk0,serial=root
-drive
id=disk1,if=none,format=raw,cache=unsafe,discard=unmap,file=/d/data.xfs
-device
virtio-blk-pci,drive=disk1,serial=data
-blockdev
driver=file,node-name=disk2-image,cache.no-flush=on,discard=unmap,filename=/d/cut
-blockdev
driver=file,node-name=disk2-log,cache.no-flush=on,discard=unmap,filename=/d/cut.writes
-blockdev
driver=blklogwrites,node-name=disk2,file=disk2-image,log=disk2-log
-device
virtio-blk-pci,drive=disk2,serial=cut,request-merging=off
-netdev
user,id=net0,hostfwd=tcp:127.0.0.9:10250-:10250
-device
virtio-net-pci,netdev=net0,romfile=";
        assert_eq!(text, expected);
    }

    #[test]
    fn without_a_network_there_is_no_network_device() {
        let words = words(&VmSpec { network: false, ..spec() });
        assert!(values(&words, "-netdev").is_empty());
        assert!(!words.iter().any(|word| word.contains("virtio-net")));
    }
}
