//! The facts that the checks judge.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use loopfs::mount::Isolation;
use loopfs::xfs::Features;
use loopfs::{Bytes, ErrorKind};
use nix::errno::Errno;

use super::host::HostFacts;
use crate::data_disk::DataMount;

/// The state of the machine and of this process, read without changing anything.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// The release of the kernel, as uname(2) returns it.
    pub(super) release: String,
    pub(super) xfs: DriverState,
    /// `true` if the kernel's XFS has quotas. `None` if that is not visible.
    pub(super) xfs_quota: Option<bool>,
    pub(super) loop_driver: DriverState,
    /// The parameter `max_part` of the loop module, if the module is loaded.
    pub(super) max_part: Option<u32>,
    pub(super) control: ControlState,
    /// `None` if the mount at `/dev` is not visible.
    pub(super) dev: Option<Dev>,
    /// `true` if the virtual devices in sysfs can be written. `None` if `/sys` is not mounted.
    pub(super) sysfs_writable: Option<bool>,
    /// The system calls that loopfs needs, and the kernel's response to invalid arguments.
    pub(super) calls: Vec<(&'static str, Errno)>,
    /// `true` if a seccomp filter is active.
    pub(super) seccomp: bool,
    /// The effective capabilities. `None` if `/proc` is not mounted.
    pub(super) capabilities: Option<u64>,
    /// `true` if the process is in the initial user namespace. `None` if `/proc` is not mounted.
    pub(super) initial_user_namespace: Option<bool>,
    /// `true` if the kernel grants leases of files. `None` if `/proc/sys` is not visible.
    pub(super) leases: Option<bool>,
    pub(super) host: HostFacts,
    /// `None` if no directory was given.
    pub(super) data_dir: Option<DataDir>,
    /// `None` if no directory was given.
    pub(super) kubelet: Option<Kubelet>,
}

/// Why something cannot be read or used.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
}

impl Failure {
    /// Returns the failure of an operation with an object.
    pub(super) fn of(operation: &str, object: impl Display, error: &io::Error) -> Self {
        let denied = error.kind() == io::ErrorKind::PermissionDenied;
        let kind = if denied { ErrorKind::PermissionDenied } else { ErrorKind::Other };
        Self { kind, message: format!("{operation} {object}: {error}") }
    }

    /// Returns `true` if another user, or a container with other rules, may not have the failure.
    pub(super) fn is_denied(&self) -> bool {
        self.kind == ErrorKind::PermissionDenied
    }
}

impl From<loopfs::Error> for Failure {
    fn from(error: loopfs::Error) -> Self {
        Self { kind: error.kind(), message: error.to_string() }
    }
}

/// A driver of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriverState {
    /// It is loaded or built in.
    Registered,
    /// Its module is installed, and not loaded.
    Module,
    /// The kernel has neither.
    Absent,
    /// It is not loaded, and this process does not see the modules of the kernel.
    Unknown,
}

/// The state of `/dev/loop-control`.
#[derive(Clone, Debug)]
pub(super) enum ControlState {
    /// The loop driver responds.
    Responds,
    /// There is no node.
    NoNode,
    /// The node exists, and was not opened, because that would load the module.
    NotOpened,
    /// It cannot be opened or used.
    Fails(Failure),
}

/// The mount at `/dev`, and the nodes of loop devices there.
#[derive(Clone, Debug)]
pub(super) struct Dev {
    pub(super) fs_type: String,
    pub(super) options: Vec<String>,
    /// Number of loop devices of the kernel.
    pub(super) devices: usize,
    /// Number of those that have a node and an index from which loopfs chooses.
    pub(super) usable: usize,
    /// Names of those that have no node.
    pub(super) without_node: Vec<String>,
    /// Names of those that have no node, and an index from which loopfs chooses.
    pub(super) chosen_without_node: Vec<String>,
    /// Names of those whose node the device cgroup does not let this process open for reading and writing. If one has an index from
    /// which loopfs chooses, the others are left out.
    pub(super) denied: Vec<String>,
}

/// The data directory.
#[derive(Clone, Debug)]
pub(super) struct DataDir {
    pub(super) path: PathBuf,
    /// The result of the checks that the store makes when it is opened.
    pub(super) verified: Result<(), Failure>,
    /// `true` if the directory has entries, which a mount would hide.
    pub(super) occupied: bool,
    /// The XFS that is mounted there. `None` if the process cannot open it, or if there is none.
    pub(super) filesystem: Option<DataFilesystemFacts>,
}

/// The XFS of the data directory.
#[derive(Clone, Debug)]
pub(super) struct DataFilesystemFacts {
    pub(super) mount: DataMount,
    /// The source of the mount.
    pub(super) device: PathBuf,
    pub(super) features: Features,
    pub(super) size: Bytes,
    pub(super) available: Bytes,
    /// `None` if this process cannot read them.
    pub(super) quota_records: Option<QuotaRecords>,
}

/// The quota records of projects.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuotaRecords {
    /// Number of blocks of the file system that contain them.
    pub(super) blocks: u64,
    /// Number of project ids with usage or limits, of which a quarter of the blocks are counted at most.
    pub(super) ids: u64,
}

/// The kubelet's directory.
#[derive(Clone, Debug)]
pub(super) struct Kubelet {
    pub(super) path: PathBuf,
    /// The path without symbolic links. `None` if the directory cannot be found.
    pub(super) resolved: Option<PathBuf>,
    /// The directories of kubelets, without symbolic links, below which pods of this node have volumes.
    pub(super) in_use: Vec<PathBuf>,
    /// The directories in which the driver mounts volumes.
    pub(super) mounted: Vec<KubeletDirectory>,
}

/// A directory below the kubelet's, in which the driver mounts volumes.
#[derive(Clone, Debug)]
pub(super) struct KubeletDirectory {
    pub(super) path: PathBuf,
    pub(super) is_link: bool,
    pub(super) mount: Result<KubeletMount, Failure>,
}

/// The mount that a directory is in.
#[derive(Clone, Debug)]
pub(super) struct KubeletMount {
    pub(super) mount_point: PathBuf,
    /// Why volumes that are mounted there do not appear on the node, if they do not.
    pub(super) isolation: Option<Isolation>,
    pub(super) shared: bool,
    pub(super) read_only: bool,
}

#[cfg(test)]
pub(super) mod tests {
    use loopfs::project_quota::Enforcement;

    use super::*;

    /// Returns the facts of a node with everything that loopfs needs.
    pub(in crate::preflight) fn complete() -> Facts {
        Facts {
            release: "6.12.48+deb13-amd64".to_owned(),
            xfs: DriverState::Registered,
            xfs_quota: Some(true),
            loop_driver: DriverState::Registered,
            max_part: Some(0),
            control: ControlState::Responds,
            dev: Some(dev("devtmpfs")),
            sysfs_writable: Some(true),
            calls: vec![("quotactl_fd", Errno::EBADF), ("mount_setattr", Errno::EINVAL)],
            seccomp: false,
            capabilities: Some((1 << 41) - 1),
            initial_user_namespace: Some(true),
            leases: Some(true),
            host: host(),
            data_dir: Some(data_dir()),
            kubelet: Some(kubelet()),
        }
    }

    pub(in crate::preflight) fn host() -> HostFacts {
        HostFacts { udev_rule: Some(true), lvm_filter: Some(true), held: Vec::new(), label: None }
    }

    pub(in crate::preflight) fn dev(fs_type: &str) -> Dev {
        let options = ["rw", "nosuid"].map(str::to_owned).into();
        Dev {
            fs_type: fs_type.to_owned(),
            options,
            devices: 9,
            usable: 1,
            without_node: Vec::new(),
            chosen_without_node: Vec::new(),
            denied: Vec::new(),
        }
    }

    pub(in crate::preflight) fn data_dir() -> DataDir {
        let mount = DataMount {
            directory: "/loopfs/data".into(),
            options: ["rw", "nosuid", "nodev", "noexec", "prjquota"].map(str::to_owned).into(),
            quota: Some(Enforcement::Enforcing),
        };
        let features = Features { crc: true, reflink: true, ftype: true, bigtime: true };
        let (size, available) = (Bytes(100 << 30), Bytes(50 << 30));
        let quota_records = Some(QuotaRecords { blocks: 40, ids: 1000 });
        let device = "/dev/vdb".into();
        let filesystem = DataFilesystemFacts { mount, device, features, size, available, quota_records };
        DataDir {
            path: "/loopfs/data".into(),
            verified: Ok(()),
            occupied: false,
            filesystem: Some(filesystem),
        }
    }

    pub(in crate::preflight) fn kubelet() -> Kubelet {
        let mounted = ["pods", "plugins"].map(|name| KubeletDirectory {
            path: format!("/var/lib/kubelet/{name}").into(),
            is_link: false,
            mount: Ok(KubeletMount {
                mount_point: "/".into(),
                isolation: None,
                shared: true,
                read_only: false,
            }),
        });
        let path = PathBuf::from("/var/lib/kubelet");
        Kubelet { resolved: Some(path.clone()), in_use: vec![path.clone()], path, mounted: mounted.into() }
    }
}
