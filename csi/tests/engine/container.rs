//! A container of the driver, and the directories of the machine that it gets.

use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;
use testcontainers::bollard::models::HostConfig;
use testcontainers::core::WaitFor;
use testcontainers::core::wait::ExitWaitStrategy;
use testcontainers::runners::SyncRunner;
use testcontainers::{Container, ContainerRequest, GenericImage, ImageExt};

use crate::support::{Client, Directories, http};

/// The directory in the container with the mount point of the data file system, as in the DaemonSet.
const DATA_PARENT: &str = "/var/lib/loopfs";
const PROGRAM: &str = "/loopfs-csi";
/// Seconds until the engine kills a container that it has asked to end.
const STOP_TIMEOUT: i32 = 60;

pub(crate) fn path_from(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    PathBuf::from(
        path.unwrap_or_else(|| panic!("{variable} is not set: run `cargo harness test --lane docker`")),
    )
}

/// What a container of the driver may do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rights {
    /// As the DaemonSet runs it.
    Privileged,
    /// The capability to mount, and the loop devices with their control device.
    LoopDevices,
    /// The capability to mount, without a device, and without the right to create the node of one.
    NoDevice,
}

/// How the kubelet's directory is mounted in the container.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Propagation {
    Shared,
    Private,
}

/// A machine that runs the driver in a container.
pub(crate) struct Machine {
    pub(crate) directories: Directories,
    rights: Rights,
    propagation: Propagation,
    /// Whether the container gets the devices of the machine.
    dev: bool,
    metrics: SocketAddr,
    /// The kubelet's directory as the driver expects it.
    kubelet_argument: PathBuf,
    mount: SharedMount,
    _scratch: TempDir,
}

impl Machine {
    /// Returns a machine whose volumes are on `data`. The kubelet's directory is a mount of its own, which is shared as
    /// on every machine with systemd.
    pub(crate) fn new(data: &Path) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let mut directories = Directories::create(scratch.path(), data);
        let mount = SharedMount::new(directories.kubelet.clone());
        // As on a node, the engine mounts a directory of that file system.
        let kubelet = directories.kubelet.join("kubelet");
        fs::create_dir(&kubelet).unwrap();
        directories.kubelet = kubelet;
        let socket = scratch.path().join("socket");
        fs::create_dir(&socket).unwrap();
        directories.endpoint = socket.join("csi.sock");
        let metrics = directories.serve_metrics();
        Self {
            rights: Rights::Privileged,
            propagation: Propagation::Shared,
            dev: true,
            metrics,
            kubelet_argument: directories.kubelet.clone(),
            directories,
            mount,
            _scratch: scratch,
        }
    }

    pub(crate) fn with_rights(self, rights: Rights) -> Self {
        Self { rights, ..self }
    }

    pub(crate) fn with_propagation(self, propagation: Propagation) -> Self {
        Self { propagation, ..self }
    }

    pub(crate) fn without_devices(self) -> Self {
        Self { dev: false, ..self }
    }

    /// Puts the volumes on a tmpfs.
    pub(crate) fn with_data_on_tmpfs(mut self) -> Self {
        self.directories.data = self.mount.0.clone();
        self
    }

    /// Makes the driver expect the kubelet's directory at a path at which the container has none.
    pub(crate) fn without_kubelet_directory(self) -> Self {
        Self { kubelet_argument: "/var/lib/elsewhere".into(), ..self }
    }

    /// Returns the status and the body of a page of the driver.
    pub(crate) fn page(&self, path: &str) -> (u16, String) {
        http::get(self.metrics, path)
    }

    /// Starts the driver, and waits until it serves its socket.
    pub(crate) fn start(&self) -> Driver {
        let container = self.request(WaitFor::message_on_stderr("serving")).start().unwrap();
        let client = Client::connect(&self.directories.endpoint);
        Driver { container, client }
    }

    /// Starts a driver that must end by itself, and returns its exit code and what it said.
    pub(crate) fn run_to_end(&self) -> (i64, String) {
        let container = self.request(WaitFor::exit(ExitWaitStrategy::new())).start().unwrap();
        let code = container.exit_code().unwrap().expect("the container has ended");
        (code, log(&container))
    }

    fn request(&self, ready: WaitFor) -> ContainerRequest<GenericImage> {
        let mut line = self.directories.command_line();
        line.remove(0);
        for argument in &mut line {
            if argument.starts_with("--data-dir=") {
                let name = self.directories.data.file_name().unwrap().to_str().unwrap();
                *argument = format!("--data-dir={DATA_PARENT}/{name}");
            } else if argument.starts_with("--kubelet-dir=") {
                *argument = format!("--kubelet-dir={}", self.kubelet_argument.display());
            }
        }
        let binds = self.binds();
        let rights = self.rights;
        GenericImage::new("loopfs", "dev")
            .with_entrypoint(PROGRAM)
            .with_wait_for(ready)
            .with_cmd(line)
            .with_network("host")
            .with_readonly_rootfs(true)
            .with_host_config_modifier(move |config| {
                config.binds.get_or_insert_default().extend_from_slice(&binds);
                rights.apply(config);
            })
    }

    /// Returns the bind mounts of the container, as `docker run --volume` takes them.
    fn binds(&self) -> Vec<String> {
        let Directories { kubelet, data, endpoint, registration, .. } = &self.directories;
        let propagation = match self.propagation {
            Propagation::Shared => "rshared",
            Propagation::Private => "private",
        };
        let same = |path: &Path, propagation| format!("{0}:{0}:{propagation}", path.display());
        let mut binds = vec![
            same(kubelet, propagation),
            format!("{}:{DATA_PARENT}:rslave", data.parent().unwrap().display()),
            same(endpoint.parent().unwrap(), "private"),
            same(registration, "private"),
            same(Path::new("/sys/devices/virtual"), "private"),
        ];
        if self.dev {
            binds.push(same(Path::new("/dev"), "private"));
        }
        binds
    }
}

/// A tmpfs from which mounts propagate, unmounted at the end even if the test fails.
struct SharedMount(PathBuf);

impl SharedMount {
    fn new(path: PathBuf) -> Self {
        mount(Some("kubelet"), &path, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &path, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        Self(path)
    }
}

impl Drop for SharedMount {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("unmount {}: {error}", self.0.display());
        }
    }
}

impl Rights {
    fn apply(self, config: &mut HostConfig) {
        match self {
            Self::Privileged => config.privileged = Some(true),
            Self::LoopDevices | Self::NoDevice => {
                config.cap_add.get_or_insert_default().push("SYS_ADMIN".to_owned());
                // The profile of the engine denies mounts.
                config.security_opt.get_or_insert_default().push("apparmor=unconfined".to_owned());
            }
        }
        if matches!(self, Self::NoDevice) {
            config.cap_drop.get_or_insert_default().push("MKNOD".to_owned());
        }
        if matches!(self, Self::LoopDevices) {
            let rules = ["b 7:* rwm", "c 10:237 rwm"].map(str::to_owned);
            config.device_cgroup_rules.get_or_insert_default().extend(rules);
        }
    }
}

/// A driver that runs in a container. The container is removed at the end.
pub(crate) struct Driver {
    container: Container<GenericImage>,
    pub(crate) client: Client,
}

impl Driver {
    /// Ends the driver with SIGTERM, and returns its exit code and what it said.
    pub(crate) fn stop(self) -> (i64, String) {
        let Self { container, client } = self;
        // The driver would wait for an open connection.
        drop(client);
        container.stop_with_timeout(Some(STOP_TIMEOUT)).unwrap();
        let code = container.exit_code().unwrap().expect("the container has ended");
        (code, log(&container))
    }
}

fn log(container: &Container<GenericImage>) -> String {
    let mut log = String::new();
    container.stderr(false).read_to_string(&mut log).unwrap();
    log
}
