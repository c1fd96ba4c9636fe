//! Distribution packages the host needs: installed where we may, else named in one line to paste.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, Result};

use crate::process::{Program, find};
use crate::session::Session;

/// A program the harness runs, or a file it reads, and the Debian package that brings it.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    program: &'static str,
    package: &'static str,
}

const fn tool(program: &'static str, package: &'static str) -> Tool {
    Tool { program, package }
}

pub const MMDEBSTRAP: Tool = tool("mmdebstrap", "mmdebstrap");
pub const MKFS_XFS: Tool = tool("mkfs.xfs", "xfsprogs");
pub const MKE2FS: Tool = tool("mke2fs", "e2fsprogs");
pub const XZ: Tool = tool("xz", "xz-utils");
pub const SETPRIV: Tool = tool("setpriv", "util-linux");
/// Debian's keys, which another distribution need not have.
const DEBIAN_KEYS: Tool = tool("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring");
/// Sub-ids of an ordinary user, so that a root file system with several owners needs no root.
const NEWUIDMAP: Tool = tool("newuidmap", "uidmap");

/// What making images and booting them needs.
pub const VIRTUAL_MACHINE: &[Tool] = &[MMDEBSTRAP, DEBIAN_KEYS, MKFS_XFS, MKE2FS, XZ, SETPRIV];

/// Makes sure that every tool is there.
///
/// # Errors
/// Some are not and cannot be installed by this user; the message is the line that does it.
pub async fn ensure(session: &Session, tools: &[Tool]) -> Result<()> {
    let root = nix::unistd::geteuid().is_root();
    let mut wanted: Vec<Tool> = tools.to_vec();
    if !root && wanted.iter().any(|tool| tool.program == MMDEBSTRAP.program) {
        wanted.push(NEWUIDMAP);
    }
    let missing = missing(&wanted, |program| find(OsStr::new(program)).is_some());
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
    let still = self::missing(&wanted, |program| find(OsStr::new(program)).is_some());
    anyhow::ensure!(still.is_empty(), "installed {packages}, yet these are missing: {still:?}");
    step.done("");
    Ok(())
}

/// The packages of the tools that are not installed, without repetition.
fn missing(tools: &[Tool], installed: impl Fn(&str) -> bool) -> BTreeSet<&'static str> {
    tools.iter().filter(|tool| !installed(tool.program)).map(|tool| tool.package).collect()
}

async fn install(packages: &BTreeSet<&'static str>) -> Result<()> {
    let apt_get = || Program::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive");
    let install = || {
        apt_get()
            // A dpkg lock held by an unattended upgrade is waited for.
            .args(["-o", "DPkg::Lock::Timeout=300", "install", "--yes", "--no-install-recommends"])
            .args(packages.iter().copied())
    };
    if Path::new("/var/cache/apt/pkgcache.bin").exists() && install().finish().await?.status.success() {
        return Ok(());
    }
    // No package lists yet, or ones so old that the mirror has moved on.
    apt_get().args(["-o", "DPkg::Lock::Timeout=300", "update"]).run().await.context("apt-get update")?;
    install().run().await.context("apt-get install")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_package_is_named_once() {
        let tools = [MKE2FS, MKFS_XFS, tool("xfs_db", "xfsprogs"), XZ];
        let missing = missing(&tools, |program| program == "xz");
        assert_eq!(missing.into_iter().collect::<Vec<_>>(), ["e2fsprogs", "xfsprogs"]);
    }
}
