//! A machine that runs until it is powered off: the root of a distribution, network, services, and requests
//! from the host.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, sethostname};

use super::children::{Children, Output, command};
use super::report::{End, Message};
use super::reporter::Reporter;
use super::services::Services;
use super::spec::{FileSpec, NodeSpec, Step};
use super::{devices, mounts, requests};

/// The addresses of the machine and of its gateway, the host's loopback, in QEMU's user-mode network.
const ADDRESS: &str = "10.0.2.15/24";
const GATEWAY: &str = "10.0.2.2";
/// The timeout for configuring the network, which takes a few netlink calls.
const NETWORK_TIMEOUT: Duration = Duration::from_secs(30);
/// The time that services have to end at power-off.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) fn run_node(spec: &NodeSpec, children: &Children, reporter: &Reporter) -> Result<()> {
    let control = devices::port(super::control::CONTROL_PORT)?;
    mounts::switch_root(&spec.root_disk)?;
    sethostname(&spec.hostname).context("set the host name")?;
    for mount in &spec.mounts {
        mounts::mount_spec(mount)?;
    }
    for file in &spec.files {
        write(file)?;
    }
    configure_network(children, reporter)?;

    let (end, ending) = mpsc::channel();
    let services = Services::new(children.clone(), reporter.clone(), end.clone());
    requests::serve(control, children.clone(), services.clone(), end.clone())?;
    // The steps run concurrently with the wait below, so that the host can send requests to a starting
    // machine and end it.
    std::thread::spawn({
        let (steps, services) = (spec.steps.clone(), services.clone());
        let (children, reporter) = (children.clone(), reporter.clone());
        move || match steps.iter().try_for_each(|step| take(step, &services, &children, &reporter)) {
            Ok(()) => reporter.send(&Message::NodeReady),
            // There is no receiver only if the machine is ending already.
            Err(error) => drop(end.send(Err(format!("{error:#}")))),
        }
    });
    let ending = ending.recv().context("wait for the end of the node")?;
    shut_down(spec, &services);
    ending.map_err(anyhow::Error::msg)
}

fn take(step: &Step, services: &Services, children: &Children, reporter: &Reporter) -> Result<()> {
    match step {
        Step::Run { name, argv, timeout } => run(name, argv, *timeout, children, reporter),
        Step::Service(service) => services.start(service),
    }
}

fn run(
    name: &str,
    argv: &[String],
    timeout: Duration,
    children: &Children,
    reporter: &Reporter,
) -> Result<()> {
    let command = command(argv)?;
    let (end, ..) = children
        .run(name, command, "", Output::Log(reporter.clone(), None), timeout)
        .with_context(|| format!("start {name}"))?;
    anyhow::ensure!(end == End::Exited(0), "{name} ended with {end:?}: {}", argv.join(" "));
    Ok(())
}

fn write(file: &FileSpec) -> Result<()> {
    let path = Path::new(&file.path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    fs::write(path, &file.content).with_context(|| format!("write {}", file.path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(file.mode))
        .with_context(|| format!("set the mode of {}", file.path))
}

fn configure_network(children: &Children, reporter: &Reporter) -> Result<()> {
    let interface = first_interface()?;
    for args in [
        ["link", "set", "lo", "up"].as_slice(),
        &["link", "set", &interface, "up"],
        &["address", "add", ADDRESS, "dev", &interface],
        &["route", "add", "default", "via", GATEWAY],
    ] {
        let argv: Vec<String> = ["ip"].iter().chain(args).map(|arg| (*arg).to_owned()).collect();
        run("ip", &argv, NETWORK_TIMEOUT, children, reporter)?;
    }
    Ok(())
}

fn first_interface() -> Result<String> {
    fs::read_dir("/sys/class/net")
        .context("list network interfaces")?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name != "lo")
        .min()
        .context("the machine has no network interface; is virtio_net loaded?")
}

/// Ends every process and unmounts the file systems.
fn shut_down(spec: &NodeSpec, services: &Services) {
    services.stop();
    let everyone = Pid::from_raw(-1);
    // ESRCH: there is no process left.
    kill(everyone, Signal::SIGTERM).ok();
    services.wait_ended(STOP_TIMEOUT);
    kill(everyone, Signal::SIGKILL).ok();
    let unmount = |target: &str| {
        if let Err(error) = mounts::unmount(target) {
            eprintln!("guest-init: {error:#}");
        }
    };
    spec.mounts.iter().rev().for_each(|mount| unmount(&mount.target));
    // Mounts of volumes have the disk in use too.
    mounts::of_type("xfs").unwrap_or_default().iter().for_each(|target| unmount(target));
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    if let Err(errno) = mount(None::<&str>, "/", None::<&str>, read_only, None::<&str>) {
        // If this fails, the next mount replays the journal.
        eprintln!("guest-init: remount / read-only: {errno}");
    }
}
