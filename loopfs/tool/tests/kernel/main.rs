//! Tests of the tool against the kernel, run with the command lines that users type. They need root and a machine of their own;
//! `cargo harness test --lane kernel` provides it.
//!
//! `LOOPFS_TEST_TOOL` is the program `loopfs`. The kernel tests of the library have the other variables, and the modules that both use.

mod command_line;
mod data_disk;
#[path = "../../../tests/kernel/device_cgroup.rs"]
mod device_cgroup;
#[path = "../../../tests/kernel/difference.rs"]
mod difference;
#[path = "../../../tests/kernel/disk.rs"]
mod disk;
mod doctor;
#[path = "../../../tests/kernel/environment.rs"]
#[allow(dead_code, reason = "the tests of the library use the rest")]
mod environment;
mod losetup;
#[path = "../../../tests/kernel/namespaces.rs"]
mod namespaces;
