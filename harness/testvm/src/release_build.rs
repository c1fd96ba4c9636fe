//! Static programs for publication: for any target, and with the same content from every checkout.
//!
//! Three things would make two builds of the same sources differ: the directories of the sources, of cargo and of the
//! target, which panics and debug information name; times; and the compiler. The build maps the directories to fixed names
//! and sets no time. The compiler belongs to the inputs: [`Toolchain::version`] names it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::Program;
use crate::rust_build::{self, Built, Toolchain};
use crate::session::Session;

/// Separates flags in `CARGO_ENCODED_RUSTFLAGS`.
const SEPARATOR: &str = "\u{1f}";

/// A build of static programs for one target.
#[derive(Clone, Copy, Debug)]
pub struct ReleaseBuild<'a> {
    pub toolchain: &'a Toolchain,
    /// The program `cargo-auditable`, which adds the list of all dependencies to each program, as its section `.dep-v0`.
    pub auditable: &'a Path,
    /// The directory of the workspace.
    pub root: &'a Path,
    /// The directory of what is built, which no build of another checkout may use.
    pub target_dir: &'a Path,
    /// The target by rustc's name.
    pub triple: &'a str,
    /// The program that compiles and links C for the target, or `None` for that of this machine.
    pub c_compiler: Option<&'a str>,
}

impl ReleaseBuild<'_> {
    /// Builds programs with these arguments to `cargo build`, as a step with the title `title`.
    pub async fn programs(&self, session: &Session, title: &str, args: &[&str]) -> Result<Built> {
        let cargo_home = cargo_home()?;
        let directories =
            [(self.root, "/workspace"), (self.target_dir, "/target"), (cargo_home.as_path(), "/cargo")];
        let mut cargo = rust_build::in_workspace(Program::new(self.auditable), self.root)
            .args(["auditable", "build", "--release", "--locked", "--target", self.triple])
            .args(args.iter().copied())
            .env("CARGO_TARGET_DIR", self.target_dir)
            .env("CARGO_BUILD_BUILD_DIR", self.target_dir)
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_ENCODED_RUSTFLAGS", rust_flags(&directories))
            .env("SOURCE_DATE_EPOCH", "0")
            .env(variable("CFLAGS", self.triple), c_flags(&directories))
            // They would run before the program that adds the list.
            .env_remove("RUSTC_WRAPPER")
            .env_remove("RUSTC_WORKSPACE_WRAPPER");
        if let Some(rustc) = &self.toolchain.rustc {
            cargo = cargo.env("RUSTC", rustc);
        }
        if let Some(compiler) = self.c_compiler {
            let linker = variable("CARGO_TARGET", self.triple).to_uppercase();
            cargo =
                cargo.env(variable("CC", self.triple), compiler).env(format!("{linker}_LINKER"), compiler);
        }
        rust_build::build(session, title, cargo)
            .await
            .with_context(|| format!("build for {} with {}", self.triple, self.toolchain.version))
    }
}

/// Returns the name of the variable `name` for one target, as cargo and the crate cc read it.
fn variable(name: &str, triple: &str) -> String {
    format!("{name}_{}", triple.replace(['-', '.'], "_"))
}

/// Returns the flags of rustc. Of two directories that contain a path, the last one counts.
fn rust_flags(directories: &[(&Path, &str)]) -> String {
    let maps =
        directories.iter().map(|(path, name)| format!("--remap-path-prefix={}={name}", path.display()));
    std::iter::once("-Ctarget-feature=+crt-static".to_owned()).chain(maps).collect::<Vec<_>>().join(SEPARATOR)
}

/// Returns the flags of the C compiler, which cannot have spaces.
fn c_flags(directories: &[(&Path, &str)]) -> String {
    let paths = directories.iter().map(|(path, name)| (path.display().to_string(), name));
    let maps = paths.filter(|(path, _)| !path.contains(' '));
    maps.map(|(path, name)| format!("-ffile-prefix-map={path}={name}")).collect::<Vec<_>>().join(" ")
}

/// Returns the directory of cargo, which has the sources of the dependencies.
fn cargo_home() -> Result<PathBuf> {
    let set = std::env::var_os("CARGO_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || std::env::home_dir().map(|home| home.join(".cargo"));
    set.or_else(home).context("neither CARGO_HOME nor HOME is set")
}
