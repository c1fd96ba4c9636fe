//! modprobe(8) for test machines, which have no other programs. The kernel runs it to load a missing module.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};

/// The directory of modules in the initramfs.
const DIRECTORY: &str = "/modules";

/// Returns the alias to load a module for, if this process was started as `modprobe -q -- ALIAS`.
pub(super) fn requested_alias() -> Option<String> {
    let mut arguments = std::env::args();
    let program = arguments.next()?;
    let is_modprobe = Path::new(&program).file_name()? == "modprobe";
    if is_modprobe { arguments.next_back() } else { None }
}

/// Loads the module that has the alias.
pub(super) fn load(alias: &str) -> Result<()> {
    for entry in fs::read_dir(DIRECTORY).with_context(|| format!("read {DIRECTORY}"))? {
        let path: PathBuf = entry?.path();
        let module = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        if has_alias(&module, alias) {
            return load_module(&path);
        }
    }
    anyhow::bail!("no module in {DIRECTORY} has the alias {alias}")
}

pub(super) fn load_module(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open the module {}", path.display()))?;
    match finit_module(&file, c"", ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno).with_context(|| format!("load the module {}", path.display())),
    }
}

/// Returns `true` if the module has this alias. A module's modinfo is a list of NUL-terminated strings.
fn has_alias(module: &[u8], alias: &str) -> bool {
    let entry = format!("\0alias={alias}\0");
    module.windows(entry.len()).any(|window| window == entry.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_alias_matches_whole_aliases() {
        let module =
            b"ELF\0license=GPL\0alias=devname:loop-control\0alias=char-major-10-237\0depends=\0name=loop\0";
        assert!(has_alias(module, "char-major-10-237") && has_alias(module, "devname:loop-control"));
        assert!(!has_alias(module, "char-major-10-23") && !has_alias(module, "loop"));
    }
}
