//! QEMU from the distribution's packages, unpacked into the cache and run from there.
//!
//! The QEMU of the host is not used, so that emulation is the same on every host. QEMU 7.2, which
//! Debian 12 has, leaves the operand of an emulated cmpxchg16b in the flags until the next instruction that
//! sets them. An interrupt in between saves these flags, and the return from it sets TF, NT or VM at random.
//! Linux allocates memory with cmpxchg16b, so a guest crashes sooner or later, and sooner on a busy host (5
//! of 7 runs of the kernel tests, 10 of 31 boots). QEMU 10.0 passed all of 15.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::debian::{EXTRACT, Selection};
use super::debian_versions::unpacked;
use crate::cache::Recipe;
use crate::process::Program;
use crate::session::Session;

const SUITE: &str = "trixie";
const PACKAGE: &str = "qemu-system-x86";
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";
const MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";

/// The directories of firmware and option ROMs in QEMU's packages.
const FIRMWARE: [&str; 3] = ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];

/// A QEMU that is ready to run.
#[derive(Clone, Debug)]
pub struct Qemu {
    directory: PathBuf,
}

impl Qemu {
    /// Returns this QEMU, from the cache or downloaded.
    pub async fn prepare(session: &Session) -> Result<Qemu> {
        let packages = [PACKAGE.to_owned()];
        let selection = Selection::new(SUITE, EXTRACT, &packages);
        let check =
            async |directory: &Path| Qemu { directory: directory.to_owned() }.version().await.map(drop);
        let directory = unpacked(session, "QEMU", &selection, Recipe::new("qemu", 2), place, check).await?;
        Ok(Qemu { directory })
    }

    /// Returns the program with its own loader, libraries, modules and firmware. The caller adds the
    /// arguments.
    pub fn program(&self) -> Program {
        let libraries = self.directory.join(LIBRARIES);
        let program = Program::new(libraries.join(LOADER))
            .named("QEMU")
            .args(["--library-path".into(), libraries, self.directory.join(PROGRAM)])
            .env("QEMU_MODULE_DIR", self.directory.join(MODULES));
        FIRMWARE
            .iter()
            .fold(program, |program, firmware| program.arg("-L").arg(self.directory.join(firmware)))
    }

    /// Returns the output of `--version`.
    pub async fn version(&self) -> Result<String> {
        Ok(self.program().arg("--version").run().await.context("run QEMU")?.stdout)
    }
}

/// Returns the path of programs, libraries and firmware, and `None` for the device nodes and configuration of
/// a system.
fn place(path: &Path) -> Option<PathBuf> {
    let wanted = path == Path::new(PROGRAM)
        || path.starts_with(LIBRARIES)
        || FIRMWARE.iter().any(|firmware| path.starts_with(firmware));
    wanted.then(|| path.to_owned())
}
