//! Selects hardware virtualisation if it works and emulation otherwise. The result of one test boot decides.
//!
//! The existence of `/dev/kvm` proves nothing. On some hosts a process can open it and create a machine, but
//! a general-purpose guest never runs. So only a kernel that boots is proof.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm_guest::spec::Mode;

use super::boot::initramfs;
use super::hypervisor::{Accelerator, Hypervisor};
use super::machine::Vm;
use super::phase::ExitReason;
use super::spec::VmSpec;
use crate::cache::Recipe;
use crate::images::kernel::Kernel;
use crate::images::qemu::Qemu;
use crate::session::Session;

/// The timeout of the probe. A kernel with hardware virtualisation reports within two seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(12);

/// The variable of the project that overrides the probe: `kvm` or `tcg`.
const OVERRIDE: &str = "ACCELERATOR";

/// Returns QEMU with the accelerator of this host, from the cache or by booting `kernel` with `init` as PID
/// 1.
///
/// # Errors
/// QEMU is not available, or the host cannot be examined. A guest that does not boot is a result, not an
/// error.
pub async fn choose(session: &Session, kernel: &Kernel, init: &Path) -> Result<Hypervisor> {
    let qemu = Qemu::prepare(session).await?;
    let accelerator = accelerator(session, &qemu, kernel, init).await?;
    Ok(Hypervisor { qemu, accelerator })
}

async fn accelerator(session: &Session, qemu: &Qemu, kernel: &Kernel, init: &Path) -> Result<Accelerator> {
    let variable = session.project.variable(OVERRIDE);
    if let Some(value) = std::env::var_os(&variable) {
        let text = value.to_string_lossy();
        return Accelerator::parse(&text)
            .with_context(|| format!("{variable} is {text:?}; it can be kvm or tcg"));
    }
    if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(Accelerator::Tcg);
    }
    let recipe = Recipe::new("accelerator", 1).with("host", host(qemu).await?);
    let answer = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            let step = session.progress.step("probe hardware virtualisation by a boot");
            let scratch = tempfile::tempdir().context("make a directory")?;
            let works = boots(qemu, kernel, init, scratch.path().to_owned()).await;
            let accelerator = if works.is_ok() { Accelerator::Kvm } else { Accelerator::Tcg };
            let why = works.err().map_or_else(String::new, |error| format!("{error:#}\n"));
            std::fs::write(directory.join("accelerator"), accelerator.to_string())?;
            std::fs::write(directory.join("why"), &why)?;
            step.done(match accelerator {
                Accelerator::Kvm => "a guest came up with KVM".to_owned(),
                Accelerator::Tcg => {
                    format!("emulating, for no guest came up with KVM: {}", why.lines().next().unwrap_or(""))
                }
            });
            Ok(())
        })
        .await?;
    let path = answer.join("accelerator");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    Accelerator::parse(&text).with_context(|| format!("{} is damaged; remove it", path.display()))
}

async fn boots(qemu: &Qemu, kernel: &Kernel, init: &Path, scratch: PathBuf) -> Result<()> {
    let path = scratch.join("initramfs");
    initramfs(&path, init, &kernel.modules(&["boot"]).await?, &[], Mode::Hello)?;
    let vm = Vm::start(&VmSpec {
        name: "probe".to_owned(),
        hypervisor: Hypervisor { qemu: qemu.clone(), accelerator: Accelerator::Kvm },
        kernel: kernel.clone(),
        initramfs: path,
        memory_mib: 512,
        cpus: 1,
        disks: Vec::new(),
        network: false,
        forwards: Vec::new(),
        logs: scratch,
    })
    .await?;
    match vm.wait_ended(PROBE_TIMEOUT).await? {
        // A fault of the kernel is reported by the machines that do some work.
        ExitReason::Passed | ExitReason::Faulty(_) => Ok(()),
        ExitReason::Failed(why) | ExitReason::Crashed(why) => anyhow::bail!(why),
    }
}

/// Returns the key of the cached result: the emulator, the host's kernel and its processor.
async fn host(qemu: &Qemu) -> Result<String> {
    let qemu = qemu.version().await?;
    let kernel = std::fs::read_to_string("/proc/version").context("read /proc/version")?;
    let processor = std::fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
    let processor: Vec<&str> = processor
        .lines()
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("model name") || line.starts_with("flags"))
        .collect();
    Ok(format!("{qemu}\n{kernel}\n{}", processor.join("\n")))
}
