//! The initramfs of one boot: PID 1, its modules and files, and its specification.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use testvm_guest::spec::{BootSpec, Mode, SPEC_PATH};

use crate::images::initramfs::Archive;
use crate::images::kernel::Module;

/// A file of the host to put into the initramfs, executable.
#[derive(Clone, Debug)]
pub struct GuestFile {
    /// The path in the guest.
    pub path: String,
    /// The path on the host.
    pub host: PathBuf,
}

/// Writes an initramfs to `target` that boots `init` as PID 1 into `mode`.
pub fn initramfs(
    target: &Path,
    init: &Path,
    modules: &[Module],
    files: &[GuestFile],
    mode: Mode,
) -> Result<()> {
    write(target, init, modules, files, mode).with_context(|| format!("write {}", target.display()))
}

fn write(target: &Path, init: &Path, modules: &[Module], files: &[GuestFile], mode: Mode) -> Result<()> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
    let mut archive = Archive::new(BufWriter::new(File::create(target)?));
    // The kernel opens this device as the standard streams of PID 1 before PID 1 can mount anything.
    archive.character_device("/dev/console", 0o600, (5, 1))?;
    archive.file("/init", 0o755, &read(init)?)?;
    // The kernel runs this program to load a missing module, until a node has switched to a root file system
    // with the real modprobe.
    archive.symbolic_link("/sbin/modprobe", "/init")?;
    let mut paths = Vec::new();
    for module in modules {
        let path = format!("/modules/{}.ko", module.name);
        archive.file(&path, 0o644, &module.content)?;
        paths.push(path);
    }
    for file in files {
        archive.file(&file.path, 0o755, &read(&file.host)?)?;
    }
    let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).context("read the clock")?.as_secs();
    let spec = BootSpec { modules: paths, unix_time, mode };
    archive.file(SPEC_PATH, 0o644, &serde_json::to_vec_pretty(&spec)?)?;
    archive.finish()?;
    Ok(())
}
