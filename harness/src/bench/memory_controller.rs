//! A CSI controller whose volumes are in memory, as a process of this machine. The sidecars of a peer call it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use testvm::process::Program;
use testvm::rust_build;
use testvm::session::Session;

/// The program, which is built.
pub(super) struct MemoryController(PathBuf);

impl MemoryController {
    /// Builds the program.
    pub(super) async fn build(session: &Session) -> Result<MemoryController> {
        Ok(MemoryController(rust_build::bench(session, "csi", "memory_controller").await?))
    }

    /// Returns the program that serves at `socket` as `driver` on `node`, until SIGTERM.
    pub(super) fn program(&self, socket: &Path, driver: &str, node: &str) -> Program {
        Program::new(&self.0).arg(socket).args([driver, node])
    }
}
