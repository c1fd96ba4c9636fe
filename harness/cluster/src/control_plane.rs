//! Runs etcd, the API server, the controller manager and the scheduler as processes on the host's loopback.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::Client;
use kube::config::Kubeconfig;
use nix::sys::signal::Signal;
use testvm::cache;
use testvm::process::{Process, Program, tail};
use testvm::session::{Project, Session};
use tokio::sync::Mutex;

use super::components::{self, API_SERVICE_ADDRESS, HOST_SEEN_FROM_GUEST};
use super::files::{create_private_dir, write_private};
use super::layout::{ClusterProfile, ClusterSpec, Durability, Layout};
use super::loopback::LoopbackLease;
use super::pki::{self, Authority, Identity, Subject};
use super::programs::Programs;
use super::release::KubernetesMinor;
use super::variant::Kubelet;
use super::{client, kubeconfig};

/// The group that has all rights.
const ADMINISTRATORS: &str = "system:masters";
/// The time from the start of a component to its first healthy response, on a machine busy with builds.
const START_DEADLINE: Duration = Duration::from_secs(180);
/// The poll interval of health checks: a server does not announce that it listens.
const HEALTH_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The time that a component has to end after SIGTERM before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// A running control plane. Dropping it kills its processes; [`ControlPlane::stop`] ends them in order.
pub struct ControlPlane {
    /// Its name is that of the cluster, its context and its user in kubeconfigs.
    project: Project,
    installation: Installation,
    authority: Authority,
    client: Client,
    components: Mutex<Components>,
}

/// What the components are started from.
struct Installation {
    layout: Layout,
    loopback: LoopbackLease,
    programs: Programs,
    durability: Durability,
    profile: ClusterProfile,
}

/// The components, in the order in which they must stop.
struct Components {
    scheduler: Process,
    /// `None` after [`ControlPlane::stop_controller_manager`].
    controller_manager: Option<Process>,
    api_server: Process,
    etcd: Process,
}

impl ControlPlane {
    /// Starts a control plane without nodes.
    ///
    /// # Errors
    /// A program cannot be built, or a component does not start; the message has the end of its log.
    pub async fn alone(
        session: &Session,
        spec: &ClusterSpec,
        kubernetes: KubernetesMinor,
    ) -> Result<ControlPlane> {
        let programs = Programs::ensure(session, Kubelet::Stock, kubernetes).await?;
        ControlPlane::start(session, spec, programs).await
    }

    /// Creates certificates and kubeconfigs, starts every component and waits until all are healthy.
    pub(crate) async fn start(
        session: &Session,
        spec: &ClusterSpec,
        programs: Programs,
    ) -> Result<ControlPlane> {
        let layout = Layout::create(spec)?;
        let step = session.progress.step("start the control plane");
        let project = session.project;
        let loopback = LoopbackLease::take()
            .with_context(|| format!("`{} down` stops a cluster that was left running", project.command))?;
        let authority = Authority::generate(project.name)?;
        create_private_dir(&layout.pki_dir())?;
        create_private_dir(&layout.etcd_dir())?;
        write_identities(project.name, &layout, &loopback, &authority)?;
        if spec.profile == ClusterProfile::Benchmark {
            write_private(&layout.audit_policy(), &components::audit_policy().to_string())?;
        }

        let client = admin_client(&layout, loopback.api_server()).await?;
        let ClusterSpec { durability, profile, .. } = *spec;
        let installation = Installation { layout, loopback, programs, durability, profile };
        let components = installation.start(&client, |names| step.note(names)).await?;
        step.done(format!("API server at https://{}", installation.loopback.api_server()));
        Ok(ControlPlane { project, installation, authority, client, components: Mutex::new(components) })
    }

    /// Returns the project of the session that started the control plane.
    pub(super) fn project(&self) -> Project {
        self.project
    }

    /// Returns the profile of the control plane and its nodes.
    pub(super) fn profile(&self) -> ClusterProfile {
        self.installation.profile
    }

    /// Returns a client with the administrator's rights.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.installation.layout.kubeconfig("admin")
    }

    /// Returns the path of a kubectl of the cluster's version.
    #[must_use]
    pub fn kubectl(&self) -> &Path {
        &self.installation.programs.kubectl
    }

    /// Returns the paths of the cluster's files.
    pub fn layout(&self) -> &Layout {
        &self.installation.layout
    }

    /// Returns the authority that servers and clients of the cluster trust.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Returns the address at which the API server must reach the kubelet of node `index`.
    pub(crate) fn kubelet_address(&self, index: u8) -> SocketAddrV4 {
        self.installation.loopback.kubelet(index)
    }

    /// Returns a client of the kubelet at `address`, with the administrator's certificate.
    pub(crate) async fn kubelet_client(&self, address: SocketAddrV4) -> Result<Client> {
        admin_client(&self.installation.layout, address).await
    }

    /// Returns a kubeconfig for a client inside a guest, which reaches the host's loopback at another
    /// address.
    pub fn guest_kubeconfig(&self, caller: &Identity) -> Result<String> {
        let port = self.installation.loopback.api_server().port();
        let server = SocketAddrV4::new(HOST_SEEN_FROM_GUEST.parse()?, port);
        let user = kubeconfig::certified(caller);
        Ok(kubeconfig::render(self.project.name, server, &self.authority.certificate(), &user))
    }

    /// Returns a kubeconfig for a client on the host with a certificate.
    pub fn host_kubeconfig(&self, caller: &Identity) -> String {
        self.kubeconfig_of_user(&kubeconfig::certified(caller))
    }

    /// Returns a kubeconfig for a client on the host.
    pub(crate) fn kubeconfig_of_user(&self, user: &serde_json::Value) -> String {
        let server = self.installation.loopback.api_server();
        kubeconfig::render(self.project.name, server, &self.authority.certificate(), user)
    }

    /// Checks that every process still runs. The error names each that has ended, with the end of its log.
    pub(crate) async fn check_alive(&self) -> Result<()> {
        let Components { scheduler, controller_manager, api_server, etcd } = &*self.components.lock().await;
        for process in [etcd, api_server, scheduler].into_iter().chain(controller_manager) {
            ensure_running(process, &self.installation.layout)?;
        }
        Ok(())
    }

    /// Kills the API server with SIGKILL and restarts it at the same address. A component that ended because the API server
    /// was unavailable is restarted, which in a real control plane the kubelet does.
    pub(crate) async fn restart_api_server(&self) -> Result<()> {
        let mut components = self.components.lock().await;
        components.api_server.signal(Signal::SIGKILL);
        components.api_server.wait().await?;
        components.api_server = self.installation.spawn_api_server()?;
        let layout = &self.installation.layout;
        wait_until_healthy(&self.client, "/readyz", &components.api_server, layout).await?;
        if let Some(controller_manager) = &mut components.controller_manager
            && controller_manager.try_wait().is_some()
        {
            *controller_manager = self.installation.spawn_controller_manager()?;
        }
        if components.scheduler.try_wait().is_some() {
            components.scheduler = self.installation.spawn_scheduler()?;
        }
        Ok(())
    }

    /// Copies the data of etcd to the new directory `backup`. The components are killed for that time, and started again.
    ///
    /// # Errors
    /// The data cannot be copied, or a component does not start; the message has the end of its log.
    pub async fn back_up(&self, backup: &Path) -> Result<()> {
        self.while_stopped(async |data: &Path| copy_directory(data, backup).await).await
    }

    /// Replaces the data of etcd by that of a backup, and starts all components again, as the documentation of etcd requires. The
    /// resource versions of the cluster are then those of the backup, and grow from there.
    ///
    /// # Errors
    /// The backup cannot be copied, or a component does not start; the message has the end of its log.
    pub async fn restore(&self, backup: &Path) -> Result<()> {
        self.while_stopped(async |data: &Path| {
            cache::remove_dir(data)?;
            copy_directory(backup, data).await
        })
        .await
    }

    /// Calls `change` with the directory of etcd's data while no component runs.
    async fn while_stopped(&self, change: impl AsyncFnOnce(&Path) -> Result<()>) -> Result<()> {
        let mut components = self.components.lock().await;
        let Components { scheduler, controller_manager, api_server, etcd } = &mut *components;
        for process in [scheduler].into_iter().chain(controller_manager).chain([api_server, etcd]) {
            process.signal(Signal::SIGKILL);
            process.wait().await?;
        }
        change(&self.installation.layout.etcd_dir().join(components::ETCD_DATA)).await?;
        *components = self.installation.start(&self.client, |_names| {}).await?;
        Ok(())
    }

    /// Stops the controller manager. From then on, only the caller changes the objects of claims and pods.
    ///
    /// # Errors
    /// The thread that waits for the process died.
    pub async fn stop_controller_manager(&self) -> Result<()> {
        let controller_manager = self.components.lock().await.controller_manager.take();
        if let Some(controller_manager) = controller_manager {
            controller_manager.stop(STOP_GRACE).await?;
        }
        Ok(())
    }

    /// Stops every component, clients before servers, so that no log ends in connection errors.
    pub async fn stop(self) -> Result<()> {
        let Components { scheduler, controller_manager, api_server, etcd } = self.components.into_inner();
        let controller_manager = controller_manager.into_iter();
        for process in [scheduler].into_iter().chain(controller_manager).chain([api_server, etcd]) {
            process.stop(STOP_GRACE).await?;
        }
        Ok(())
    }
}

impl Installation {
    /// Starts every component, and waits until all are healthy. `note` is called with the names of those that are started.
    async fn start(&self, client: &Client, note: impl Fn(&'static str)) -> Result<Components> {
        note("etcd, kube-apiserver");
        let etcd = self.spawn_etcd()?;
        let api_server = self.spawn_api_server()?;
        wait_until_healthy(client, "/readyz", &api_server, &self.layout).await?;

        note("kube-controller-manager, kube-scheduler");
        let controller_manager = self.spawn_controller_manager()?;
        let scheduler = self.spawn_scheduler()?;
        let manager_client = admin_client(&self.layout, self.loopback.controller_manager()).await?;
        let scheduler_client = admin_client(&self.layout, self.loopback.scheduler()).await?;
        wait_until_healthy(&manager_client, "/healthz", &controller_manager, &self.layout).await?;
        wait_until_healthy(&scheduler_client, "/readyz", &scheduler, &self.layout).await?;
        Ok(Components { scheduler, controller_manager: Some(controller_manager), api_server, etcd })
    }

    fn spawn_etcd(&self) -> Result<Process> {
        let directory = self.layout.etcd_dir();
        for socket in [components::ETCD_CLIENT_SOCKET, components::ETCD_PEER_SOCKET] {
            // A killed etcd leaves its socket. No other etcd uses the socket, because a lease protects the cluster's directory.
            cache::remove_file(&directory.join(socket))?;
        }
        spawn(&self.programs.etcd, components::etcd(self.durability), &directory, &self.layout)
    }

    fn spawn_api_server(&self) -> Result<Process> {
        let args = components::api_server(&self.layout, self.loopback.api_server(), self.profile);
        spawn(&self.programs.kube_apiserver, args, &self.layout.etcd_dir(), &self.layout)
    }

    fn spawn_controller_manager(&self) -> Result<Process> {
        let args =
            components::controller_manager(&self.layout, self.loopback.controller_manager(), self.profile);
        spawn(&self.programs.kube_controller_manager, args, &self.layout.root, &self.layout)
    }

    fn spawn_scheduler(&self) -> Result<Process> {
        let args = components::secured(&self.layout, "scheduler", self.loopback.scheduler());
        spawn(&self.programs.kube_scheduler, args, &self.layout.root, &self.layout)
    }
}

fn spawn(program: &Path, args: Vec<OsString>, directory: &Path, layout: &Layout) -> Result<Process> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    Program::new(program).args(args).current_dir(directory).log(layout.log(&name)).spawn()
}

/// Creates a client with the administrator's certificate for the server at `address`. The scheduler, the
/// controller manager and the kubelets accept the administrator as the API server does.
async fn admin_client(layout: &Layout, address: SocketAddrV4) -> Result<Client> {
    let path = layout.kubeconfig("admin");
    let kubeconfig = Kubeconfig::read_from(&path).with_context(|| format!("read {}", path.display()))?;
    let mut config = client::config(kubeconfig).await?;
    config.cluster_url = format!("https://{address}").parse()?;
    Client::try_from(config).with_context(|| format!("create a client of https://{address}"))
}

async fn wait_until_healthy(client: &Client, path: &str, process: &Process, layout: &Layout) -> Result<()> {
    let started = Instant::now();
    loop {
        ensure_running(process, layout)?;
        let request = http::Request::get(path).body(Vec::new())?;
        let Err(unhealthy) = client.request_text(request).await else { return Ok(()) };
        anyhow::ensure!(
            started.elapsed() < START_DEADLINE,
            "{} is not healthy after {START_DEADLINE:?}: {path} returns: {unhealthy}; {}",
            process.name(),
            log_tail(process, layout)
        );
        tokio::time::sleep(HEALTH_POLL_INTERVAL).await;
    }
}

fn ensure_running(process: &Process, layout: &Layout) -> Result<()> {
    let Some(status) = process.try_wait() else { return Ok(()) };
    anyhow::bail!("{} ended with {status}; {}", process.name(), log_tail(process, layout))
}

fn log_tail(process: &Process, layout: &Layout) -> String {
    let log = layout.log(process.name());
    let lines = tail(&fs::read_to_string(&log).unwrap_or_default(), 12);
    format!("its log, {}, ends with:\n{lines}", log.display())
}

fn write_identities(
    cluster: &str,
    layout: &Layout,
    loopback: &LoopbackLease,
    authority: &Authority,
) -> Result<()> {
    let localhost = loopback.api_server().ip().to_string();
    let names = [
        &localhost,
        HOST_SEEN_FROM_GUEST,
        API_SERVICE_ADDRESS,
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ];
    let names = names.map(str::to_owned).to_vec();
    write_private(&layout.pki("ca.crt"), &authority.certificate())?;
    // Nothing acts as a front proxy, so the key of its authority is discarded.
    write_private(&layout.pki("front-proxy-ca.crt"), &Authority::generate("front-proxy")?.certificate())?;
    write_identity(layout, "apiserver", &authority.server("kube-apiserver", names)?)?;
    for component in ["controller-manager", "scheduler"] {
        write_identity(layout, component, &authority.server(component, vec![localhost.clone()])?)?;
    }
    // A kubelet authorises requests through the API server, whose own user has no rights by default.
    let kubelet_client = Subject { user: "kube-apiserver-kubelet-client", group: Some(ADMINISTRATORS) };
    write_identity(layout, "apiserver-kubelet-client", &authority.client(kubelet_client)?)?;
    let (private, public) = pki::signing_key_pair()?;
    write_private(&layout.pki("service-account.key"), &private)?;
    write_private(&layout.pki("service-account.pub"), &public)?;

    let callers = [
        ("admin", Subject { user: "admin", group: Some(ADMINISTRATORS) }),
        ("controller-manager", Subject { user: "system:kube-controller-manager", group: None }),
        ("scheduler", Subject { user: "system:kube-scheduler", group: None }),
    ];
    for (name, subject) in callers {
        let user = kubeconfig::certified(&authority.client(subject)?);
        let text = kubeconfig::render(cluster, loopback.api_server(), &authority.certificate(), &user);
        write_private(&layout.kubeconfig(name), &text)?;
    }
    Ok(())
}

fn write_identity(layout: &Layout, name: &str, identity: &Identity) -> Result<()> {
    write_private(&layout.pki(&format!("{name}.crt")), &identity.certificate)?;
    write_private(&layout.pki(&format!("{name}.key")), &identity.key)
}

/// Copies a directory to another one, which must not exist.
async fn copy_directory(from: &Path, to: &Path) -> Result<()> {
    Program::new("cp").arg("--archive").args([from, to]).run().await.map(drop)
}
