//! The work of a virtual machine. The host writes it as `/spec.json` into the initramfs.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The path of the specification in the initramfs.
pub const SPEC_PATH: &str = "/spec.json";

/// The complete specification of one boot of a guest.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct BootSpec {
    /// The kernel modules to load, as paths in the initramfs, each after its dependencies.
    pub modules: Vec<String>,
    /// The time in seconds since the epoch, because the clock of an emulated machine may be wrong.
    pub unix_time: u64,
    pub mode: Mode,
}

/// The work of one boot.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Report that the kernel has booted, and power off. Used to probe the accelerator.
    Hello,
    Tests(TestsSpec),
    Node(NodeSpec),
}

/// Runs test binaries one after the other as root, reports each, and powers off.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct TestsSpec {
    pub mounts: Vec<Mount>,
    /// Services that are started in order before the first binary and stopped after the last one.
    pub services: Vec<Service>,
    pub env: BTreeMap<String, String>,
    pub binaries: Vec<TestBinary>,
}

/// A test binary, which passes if it ends with exit code 0.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct TestBinary {
    pub name: String,
    /// The path in the guest.
    pub path: String,
    pub args: Vec<String>,
    /// Environment variables in addition to [`TestsSpec::env`].
    pub env: BTreeMap<String, String>,
    /// A file that the binary writes. The guest reports its lines as the output of a program called
    /// [`Self::reported_as`].
    pub report: Option<String>,
    /// The limit of its run time. A binary that exceeds it is killed and has failed.
    pub timeout: Duration,
}

impl TestBinary {
    /// Returns the name of the lines of [`Self::report`] in the log.
    pub fn reported_as(name: &str) -> String {
        format!("{name}.report")
    }
}

/// A file system to mount.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Mount {
    pub source: Source,
    pub target: String,
    pub fs_type: String,
    /// The mount options, as in fstab: `prjquota,nodev,nosuid,noexec`, or `defaults`.
    pub options: String,
}

impl Mount {
    /// Returns the mount of a disk's file system.
    #[must_use]
    pub fn of_disk(disk: &str, target: &str, fs_type: &str, options: &str) -> Mount {
        Mount {
            source: Source::Disk(disk.to_owned()),
            target: target.to_owned(),
            fs_type: fs_type.to_owned(),
            options: options.to_owned(),
        }
    }

    /// Returns the mount of a file system that needs no disk, such as `tmpfs`.
    #[must_use]
    pub fn without_disk(fs_type: &str, target: &str, options: &str) -> Mount {
        Mount { source: Source::Name(fs_type.to_owned()), ..Mount::of_disk("", target, fs_type, options) }
    }
}

/// The source of a mount.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The disk that the host attached with this name.
    Disk(String),
    /// A source that the file system type understands, such as `tmpfs`.
    Name(String),
    /// A directory, which is created if it is missing. It is mounted with flags of its own, and mounts below the target
    /// do not appear in the directory.
    Directory(String),
}

/// A machine that runs until it is powered off: the root file system of a distribution, and services of the
/// caller.
///
/// Before the first step, the guest switches to the root disk and mounts proc, sys, dev and cgroup2, and
/// tmpfs on /run and /tmp. It makes `/` a shared mount and mounts [`NodeSpec::mounts`] in order. It then
/// writes [`NodeSpec::files`], and gives the first network interface its address in QEMU's user-mode network.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeSpec {
    pub hostname: String,
    /// The name of the disk that holds the root file system (ext4).
    pub root_disk: String,
    pub mounts: Vec<Mount>,
    pub files: Vec<FileSpec>,
    /// The steps, in their order. The node is ready after the last. A step that fails ends the run.
    pub steps: Vec<Step>,
}

/// A small text file. Large files belong on a disk.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FileSpec {
    pub path: String,
    pub mode: u32,
    pub content: String,
}

/// A step of the start of a node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Runs a program, with `name` as the name of its lines in the log. The next step begins after it has ended with exit
    /// code 0.
    Run { name: String, argv: Vec<String>, timeout: Duration },
    /// Starts a program that keeps running. The next step begins when it is ready.
    Service(Service),
}

/// A program that keeps running.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Service {
    /// The name of its lines in the log.
    pub name: String,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// A file to which the guest also appends each line, for programs of the node that read logs. When it has 8 MiB, the
    /// guest renames it to a name that ends in `.1`, and creates it again.
    pub log_file: Option<String>,
    /// `true` if the guest restarts the service one second after it ended, whatever the reason. Otherwise, the end of the
    /// service is a failure of the machine.
    pub restart: bool,
    /// The condition by which the guest finds out that the service is ready.
    pub ready: Condition,
    /// The time until then. A service that takes longer has failed.
    pub ready_within: Duration,
}

/// A condition that the guest polls.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// The unix socket accepts connections.
    UnixSocket(String),
    /// The address, such as `127.0.0.1:10248`, accepts connections.
    Tcp(String),
    /// The program ends with exit code 0.
    Succeeds(Vec<String>),
}
