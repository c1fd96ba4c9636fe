//! The distribution packages that the host needs. They are installed if the user may do that; otherwise an
//! error has the command to paste.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use tokio::sync::oneshot;

use crate::cache;
use crate::process::{Program, find};
use crate::session::Session;

/// The lock of the package lists, and how long to wait for it.
const LISTS_LOCK: &str = "/var/lib/apt/lists/lock";
const LISTS_TIMEOUT: Duration = Duration::from_secs(300);

/// A program that this crate runs, or a file that it reads, and its Debian package.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    program: &'static str,
    package: &'static str,
}

const fn tool(program: &'static str, package: &'static str) -> Tool {
    Tool { program, package }
}

/// Builds root file systems from Debian packages.
const MMDEBSTRAP: Tool = tool("mmdebstrap", "mmdebstrap");
/// Creates XFS file systems.
const MKFS_XFS: Tool = tool("mkfs.xfs", "xfsprogs");
/// Creates ext4 file systems.
const MKFS_EXT4: Tool = tool("mke2fs", "e2fsprogs");
/// Decompresses kernel modules.
const XZ: Tool = tool("xz", "xz-utils");
/// Starts child processes that end with their owner.
const SETPRIV: Tool = tool("setpriv", "util-linux");
/// Checks and tests rules of Prometheus. Under systemd, the installation of its package starts a Prometheus server.
pub const PROMTOOL: Tool = tool("promtool", "prometheus");
/// Compiles and links C for aarch64.
const GCC_AARCH64: Tool = tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu");
/// The static C library for aarch64, which the compiler only recommends.
const LIBC_AARCH64: Tool = tool("/usr/aarch64-linux-gnu/lib/libc.a", "libc6-dev-arm64-cross");
/// Runs programs of aarch64.
const QEMU_AARCH64: Tool = tool("qemu-aarch64", "qemu-user");
/// Debian's keys, which another distribution may lack.
const DEBIAN_KEYS: Tool = tool("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring");
/// newuidmap maps the subordinate ids of an ordinary user. With it, building a root file system with several
/// owners needs no root.
const NEWUIDMAP: Tool = tool("newuidmap", "uidmap");

/// The tools that build and boot images.
pub const VIRTUAL_MACHINE: &[Tool] = &[MMDEBSTRAP, DEBIAN_KEYS, MKFS_XFS, MKFS_EXT4, XZ, SETPRIV];

/// The tools that link and start programs of aarch64 on a machine of another architecture.
pub const AARCH64: &[Tool] = &[GCC_AARCH64, LIBC_AARCH64, QEMU_AARCH64];

/// The tools that fetch packages for [`images`](crate::images).
pub(crate) const FETCH: &[Tool] = &[MMDEBSTRAP, DEBIAN_KEYS, SETPRIV];

/// Returns `true` if the tool is installed.
#[must_use]
pub fn is_installed(tool: Tool) -> bool {
    find(OsStr::new(tool.program)).is_some()
}

/// Checks that every tool is installed, and installs missing ones if possible.
///
/// # Errors
/// Tools are missing and this user cannot install them; the message has the command that does.
pub async fn ensure(session: &Session, tools: &[Tool]) -> Result<()> {
    let root = nix::unistd::geteuid().is_root();
    let mut wanted: Vec<Tool> = tools.to_vec();
    if !root && wanted.iter().any(|tool| tool.program == MMDEBSTRAP.program) {
        wanted.push(NEWUIDMAP);
    }
    if packages_of_missing(&wanted).is_empty() {
        return Ok(());
    }
    // Lanes install concurrently, and another one may install the same packages now.
    let _lock = cache::lock(&session.cache.root().join("packages.lock")).await?;
    let missing = packages_of_missing(&wanted);
    if missing.is_empty() {
        return Ok(());
    }
    let packages = missing.iter().copied().collect::<Vec<_>>().join(" ");
    let line = format!("apt-get update && apt-get install --yes --no-install-recommends {packages}");
    anyhow::ensure!(
        root && find(OsStr::new("apt-get")).is_some(),
        "these packages are needed and not installed; as root, run:\n  {line}\n\
         (on a distribution without apt, install its packages of the same programs)"
    );
    let step = session.progress.step(format!("install {packages}"));
    install(&missing).await?;
    let still = packages_of_missing(&wanted);
    anyhow::ensure!(still.is_empty(), "installed {packages}, yet these are missing: {still:?}");
    step.done("");
    Ok(())
}

/// Returns the packages of the tools that are not installed, without repetition.
fn packages_of_missing(tools: &[Tool]) -> BTreeSet<&'static str> {
    tools.iter().filter(|tool| !is_installed(**tool)).map(|tool| tool.package).collect()
}

async fn install(packages: &BTreeSet<&'static str>) -> Result<()> {
    let apt_get = || Program::new("apt-get").downloads().env("DEBIAN_FRONTEND", "noninteractive");
    let install = || {
        apt_get()
            // Wait if an unattended upgrade holds the dpkg lock.
            .args(["-o", "DPkg::Lock::Timeout=300", "install", "--yes", "--no-install-recommends"])
            .args(packages.iter().copied())
    };
    if Path::new("/var/cache/apt/pkgcache.bin").exists() && install().finish().await?.status.success() {
        return Ok(());
    }
    // There are no package lists yet, or they are outdated and the mirror has newer packages. apt-get does not wait for the lock of
    // another program that reads the lists, such as apt-daily.service after the boot.
    wait_for_lists().await?;
    apt_get().args(["-o", "DPkg::Lock::Timeout=300", "update"]).run().await.context("apt-get update")?;
    install().run().await.context("apt-get install")?;
    Ok(())
}

/// Waits until no other program locks the package lists.
async fn wait_for_lists() -> Result<()> {
    let Ok(file) = File::options().write(true).open(LISTS_LOCK) else { return Ok(()) };
    let (locked, wait) = oneshot::channel();
    // A thread that the end of the program does not wait for.
    std::thread::spawn(move || {
        let whole = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        locked.send(fcntl(&file, FcntlArg::F_OFD_SETLKW(&whole)))
    });
    let locked = tokio::time::timeout(LISTS_TIMEOUT, wait).await;
    let locked = locked.with_context(|| {
        format!("another program locks {LISTS_LOCK} for {LISTS_TIMEOUT:?}; wait until it has ended")
    })?;
    locked?.with_context(|| format!("lock {LISTS_LOCK}")).map(drop)
}
