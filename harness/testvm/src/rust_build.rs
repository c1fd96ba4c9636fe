//! Static builds of Rust programs and tests with cargo, which rebuilds only what has changed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process::Program;
use crate::session::Session;

/// Links the C library into the program, because the guests and images have none.
const RUSTFLAGS: &str = "-Ctarget-feature=+crt-static";

/// A Rust compiler.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The program, or `None` for the one that cargo finds.
    pub rustc: Option<PathBuf>,
    /// What it prints as its version.
    pub version: String,
}

impl Toolchain {
    /// Returns the compiler with this path, or the one that cargo finds in `workspace`.
    pub async fn of(workspace: &Path, rustc: Option<PathBuf>) -> Result<Toolchain> {
        let program = rustc.clone().map_or_else(default_rustc, PathBuf::into_os_string);
        let printed = Program::new(program).arg("--version").current_dir(workspace).run().await?.stdout;
        Ok(Toolchain { rustc, version: printed.trim().to_owned() })
    }
}

/// Builds the unit tests of a package's library for this machine. The program runs where it was built.
pub async fn unit_tests(session: &Session, package: &str, feature: &str, profile: &str) -> Result<PathBuf> {
    let cargo = program(session.workspace.root())
        .args(["test", "--no-run", "--package", package, "--lib", "--features", feature])
        .args(["--profile", profile]);
    build(session, &format!("build the tests of {package} with {feature}"), cargo).await?.program(package)
}

/// Builds the benchmark `name` of a package, which the feature `__tests` enables.
pub async fn bench(session: &Session, package: &str, name: &str) -> Result<PathBuf> {
    let args = ["build", "--profile=bench", "--package", package, "--bench", name, "--features", "__tests"];
    let title = format!("build the benchmark {name} of {package}");
    programs(session, &title, &args).await?.program(name)
}

/// Builds static programs with these arguments to cargo, as a step with the title `title`.
pub async fn programs(session: &Session, title: &str, args: &[&str]) -> Result<Built> {
    // In the order of the calls.
    let _turn = session.turn_to_compile().await;
    let root = session.workspace.root();
    run(session, title, linked_statically(program(root).args(args.iter().copied()), root).await?).await
}

/// Runs a build of cargo as a step with the title `title`.
pub(crate) async fn build(session: &Session, title: &str, cargo: Program) -> Result<Built> {
    let _turn = session.turn_to_compile().await;
    run(session, title, cargo).await
}

async fn run(session: &Session, title: &str, cargo: Program) -> Result<Built> {
    let step = session.progress.step(title);
    let cargo = cargo.args(["--message-format", "json-render-diagnostics"]);
    let finished = cargo.on_stderr_line(step.line_notes()).run().await?;
    step.done("");
    Ok(Built(artifacts(&finished.stdout)))
}

/// The result of a cargo build.
pub struct Built(Vec<Artifact>);

impl Built {
    /// Returns the path of the program of this name.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let found = self.0.iter().find(|artifact| artifact.target.name == name);
        let path = found.and_then(|artifact| artifact.executable.clone());
        path.with_context(|| format!("cargo built no program called {name}"))
    }

    /// Returns the path of the test binary `tests/<name>` of a package.
    pub fn test(&self, package: &str, name: &str) -> Result<PathBuf> {
        let is_it = |artifact: &&Artifact| artifact.target.name == name && artifact.is_of(package);
        let path = self.0.iter().find(is_it).and_then(|artifact| artifact.executable.clone());
        path.with_context(|| format!("cargo built no tests called {name} of {package}"))
    }
}

#[derive(Deserialize)]
struct Artifact {
    reason: String,
    package_id: String,
    target: Target,
    executable: Option<PathBuf>,
}

impl Artifact {
    /// The id of a package ends in `/NAME#VERSION`, or in `#NAME@VERSION` if its directory has another name.
    fn is_of(&self, package: &str) -> bool {
        let (path, version) = self.package_id.rsplit_once('#').unwrap_or_default();
        let directory = path.rsplit('/').next().unwrap_or_default();
        version.split_once('@').map_or(directory, |(name, _)| name) == package
    }
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// Has a command of cargo build static programs for this machine.
async fn linked_statically(cargo: Program, root: &Path) -> Result<Program> {
    // With an explicit target, cargo does not pass the flags to build scripts and procedural macros.
    let version = rustc(root, &["-vV"]).await?;
    let target = version.lines().find_map(|line| line.strip_prefix("host: "));
    let target = target.context("rustc -vV names no host")?;
    Ok(cargo.args(["--target", target]).env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS))
}

/// Returns cargo in the workspace, without the variables that the outer cargo set for the package of
/// this program. Build scripts that depend on such variables would run again each time.
pub fn program(workspace: &Path) -> Program {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    in_workspace(Program::new(cargo), workspace)
}

/// Has a program that runs cargo work in the workspace, without the variables of the outer cargo.
pub fn in_workspace(program: Program, workspace: &Path) -> Program {
    let mut program = program.downloads().current_dir(workspace);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") || text == "CARGO_BIN_NAME" {
            program = program.env_remove(name);
        }
    }
    program
}

fn artifacts(messages: &str) -> Vec<Artifact> {
    // Messages of other kinds have other fields.
    let parsed = messages.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    parsed
        .filter(|artifact| artifact.reason == "compiler-artifact" && artifact.executable.is_some())
        .collect()
}

/// Returns `true` if rustc has the standard library for a target.
pub async fn has_target(session: &Session, triple: &str) -> Result<bool> {
    let printed = rustc(session.workspace.root(), &["--print", "target-libdir", "--target", triple]).await?;
    Ok(Path::new(printed.trim()).is_dir())
}

/// Returns the output of rustc with these arguments.
async fn rustc(workspace: &Path, args: &[&str]) -> Result<String> {
    Ok(Program::new(default_rustc()).args(args.iter().copied()).current_dir(workspace).run().await?.stdout)
}

fn default_rustc() -> OsString {
    std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_among_the_messages() {
        let messages = r#"{"reason":"compiler-artifact","package_id":"a#1","target":{"name":"library"},"executable":null}
{"reason":"build-script-executed","package_id":"x"}
{"reason":"compiler-artifact","package_id":"path+file:///w/disk#0.1.0","target":{"name":"kernel"},"executable":"/t/kernel-1"}
{"reason":"compiler-artifact","package_id":"path+file:///w/a#tool@0.1.0","target":{"name":"kernel"},"executable":"/t/kernel-2"}
{"reason":"build-finished","success":true}"#;
        let built = Built(artifacts(messages));
        assert_eq!(built.program("kernel").unwrap(), PathBuf::from("/t/kernel-1"));
        assert!(built.program("library").is_err());
        for (package, path) in [("disk", Some("/t/kernel-1")), ("tool", Some("/t/kernel-2")), ("a", None)] {
            assert_eq!(built.test(package, "kernel").ok(), path.map(PathBuf::from), "{package}");
        }
    }
}
