//! What a virtual machine is to do: written by the host as `/spec.json` in the initramfs.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Where the specification is in the initramfs.
pub const SPEC_PATH: &str = "/spec.json";

/// The complete specification of one boot of a guest.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct BootSpec {
    /// Kernel modules to load, as paths in the initramfs, each after those it depends on.
    pub modules: Vec<String>,
    /// Seconds since the epoch: an emulated machine need not have a clock worth trusting.
    pub unix_time: u64,
    pub mode: Mode,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Say that the kernel came up, and power off. The accelerator probe.
    Hello,
    Tests(TestsSpec),
    Node(NodeSpec),
}

/// Run test binaries one after the other as root, report each, power off.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct TestsSpec {
    pub mounts: Vec<Mount>,
    /// Started in order before the first binary, and asked to end after the last one.
    pub services: Vec<Service>,
    pub env: BTreeMap<String, String>,
    pub binaries: Vec<TestBinary>,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct TestBinary {
    pub name: String,
    /// Where it is in the guest.
    pub path: String,
    pub args: Vec<String>,
    /// Beside [`TestsSpec::env`].
    pub env: BTreeMap<String, String>,
    /// A file that it writes. The guest says its lines as if a program called as [`Self::reported_as`] did.
    pub report: Option<String>,
    /// A binary that runs longer is killed and has failed.
    pub timeout: Duration,
}

impl TestBinary {
    /// Names the lines of [`Self::report`] in the log.
    #[must_use]
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
    /// As in fstab: `prjquota,nodev,nosuid,noexec`, or `defaults`.
    pub options: String,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The disk that the host attached under this name.
    Disk(String),
    /// A word the file system type makes sense of, such as `tmpfs`.
    Name(String),
}

/// A machine that stays up: root file system of a distribution, services of the caller's.
///
/// Before the first step the guest has switched to the root disk, mounted proc, sys, dev, cgroup2 and
/// tmpfs on /run and /tmp, made `/` a shared mount, mounted [`NodeSpec::mounts`] in order, configured the
/// network, and written [`NodeSpec::files`].
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeSpec {
    pub hostname: String,
    /// The name of the disk that holds the root file system (ext4).
    pub root_disk: String,
    pub mounts: Vec<Mount>,
    pub network: Option<Network>,
    pub files: Vec<FileSpec>,
    /// Done in order; the node is ready after the last. One that fails ends the run.
    pub steps: Vec<Step>,
}

/// Static addresses on the first network interface.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Network {
    /// With its prefix length: `10.0.2.15/24`.
    pub address: String,
    pub gateway: String,
    pub dns: Option<String>,
}

impl Default for Network {
    /// What QEMU's user-mode network expects; the host's loopback is the gateway.
    fn default() -> Network {
        Network { address: "10.0.2.15/24".to_owned(), gateway: "10.0.2.2".to_owned(), dns: None }
    }
}

/// A small text file. Large ones belong on a disk.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FileSpec {
    pub path: String,
    pub mode: u32,
    pub content: String,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// A program that must end with 0 before the next step begins.
    Run(Command),
    /// A program that keeps running; the next step begins when it is ready.
    Service(Service),
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Command {
    /// Names its lines in the log.
    pub name: String,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub timeout: Duration,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Service {
    /// Names its lines in the log.
    pub name: String,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub restart: Restart,
    pub ready: Option<Ready>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// Its end, however it came, is followed by a new start after a second.
    Always,
    /// Its end fails the node.
    Never,
}

/// How a service shows that it can be used.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Ready {
    pub when: Condition,
    /// A service that takes longer has failed.
    pub within: Duration,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// Something accepts connections on this unix socket.
    UnixSocket(String),
    /// Something accepts connections on this address, such as `127.0.0.1:10248`.
    Tcp(String),
    /// This program ends with 0.
    Succeeds(Vec<String>),
}
