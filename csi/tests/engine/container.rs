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
/// The message of a driver that serves its socket.
pub(crate) const SERVING: &str = "serving";
/// A path at which the container has no directory.
pub(crate) const ABSENT_KUBELET: &str = "/var/lib/elsewhere";
/// Seconds from SIGTERM until the engine kills a container.
const STOP_TIMEOUT: i32 = 60;

pub(crate) fn path_from(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    PathBuf::from(
        path.unwrap_or_else(|| panic!("{variable} is not set: run `cargo harness test --lane docker`")),
    )
}

/// The rights of a container of the driver. Each but the first includes the capability to mount.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rights {
    /// All, as in the DaemonSet.
    Privileged,
    /// To create and open the nodes of the loop driver.
    LoopDevices,
    /// To create the nodes of all devices, and to open none of the loop driver. This is the default of the engine.
    NoLoopDevices,
    /// Neither to create nor to open nodes of the loop driver.
    NoNodes,
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
    /// `true` if the container has the `/dev` of the machine. Otherwise the engine makes one for each container.
    has_dev_of_machine: bool,
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
            has_dev_of_machine: true,
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

    /// Gives each container a `/dev` of its own, without a node of the loop driver.
    pub(crate) fn with_own_dev(self) -> Self {
        Self { has_dev_of_machine: false, ..self }
    }

    /// Puts the volumes on a tmpfs.
    pub(crate) fn with_data_on_tmpfs(mut self) -> Self {
        self.directories.data = self.mount.0.clone();
        self
    }

    /// Makes the driver expect the kubelet's directory at [`ABSENT_KUBELET`].
    pub(crate) fn without_kubelet_directory(self) -> Self {
        Self { kubelet_argument: ABSENT_KUBELET.into(), ..self }
    }

    /// Returns the status and the body of a page of the driver.
    pub(crate) fn page(&self, path: &str) -> (u16, String) {
        http::get(self.metrics, path)
    }

    pub(crate) fn wait_until_alive(&self) {
        http::wait_until_alive(self.metrics);
    }

    /// Waits until the driver is ready. A thread that is late looks like a disk that hangs.
    pub(crate) fn wait_until_ready(&self) {
        http::wait_for_status(self.metrics, "/readyz", 200);
    }

    /// Starts the driver, and waits until it serves its socket.
    pub(crate) fn start(&self) -> Driver {
        let container = self.request(WaitFor::message_on_stderr(SERVING)).start().unwrap();
        let client = Client::connect(&self.directories.endpoint);
        Driver { container, client }
    }

    /// Starts a driver that must end by itself, and returns its exit code and its log.
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
        if self.has_dev_of_machine {
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
            Self::LoopDevices | Self::NoLoopDevices | Self::NoNodes => {
                config.cap_add.get_or_insert_default().push("SYS_ADMIN".to_owned());
                // The profile of the engine denies mounts.
                config.security_opt.get_or_insert_default().push("apparmor=unconfined".to_owned());
            }
        }
        if matches!(self, Self::NoNodes) {
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
    /// Ends the driver with SIGTERM, and returns its exit code and its log.
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
