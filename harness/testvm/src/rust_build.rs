//! Static builds of Rust programs and tests with cargo, which rebuilds only what has changed.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process::Program;
use crate::progress::Step;
use crate::session::Session;

/// Links the C library into the program, because the guests and images have none.
const RUSTFLAGS: &str = "-Ctarget-feature=+crt-static";

/// The build profile of tests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Profile {
    Debug,
    /// The profile of programs that are installed.
    Release,
}

/// A Rust compiler.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The program, or `None` for the one that cargo finds.
    rustc: Option<PathBuf>,
    version: String,
}

impl Toolchain {
    /// Returns the compiler that cargo finds in `workspace`.
    ///
    /// # Errors
    /// rustc does not run.
    pub async fn installed(workspace: &Path) -> Result<Toolchain> {
        let version = rustc(workspace, &["--version"]).await?.trim().to_owned();
        Ok(Toolchain { rustc: None, version })
    }

    /// Returns the compiler with this path.
    ///
    /// # Errors
    /// The program does not run.
    pub async fn of(workspace: &Path, rustc: PathBuf) -> Result<Toolchain> {
        let printed = Program::new(&rustc).arg("--version").current_dir(workspace).run().await?;
        Ok(Toolchain { rustc: Some(rustc), version: printed.stdout.trim().to_owned() })
    }

    /// Returns the program, or `None` for the one that cargo finds.
    #[must_use]
    pub fn rustc(&self) -> Option<&Path> {
        self.rustc.as_deref()
    }

    /// Returns what the compiler prints as its version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }
}

/// Builds the unit tests of a package's library for this machine. The program runs where it was built.
///
/// # Errors
/// The tests do not compile.
pub async fn unit_tests(
    session: &Session,
    package: &str,
    feature: &str,
    profile: Profile,
) -> Result<PathBuf> {
    let _turn = session.turn_to_compile().await;
    let step = session.progress.step(format!("build the tests of {package} with {feature}"));
    let notes = step.notes();
    let release: &[&str] = match profile {
        Profile::Debug => &[],
        Profile::Release => &["--release"],
    };
    let finished = program(session.workspace.root())
        .args(["test", "--no-run", "--package", package, "--lib", "--features", feature])
        .args(release)
        .args(["--message-format", "json-render-diagnostics"])
        .on_stderr_line(move |line| notes.note(line.trim().to_owned()))
        .run()
        .await?;
    step.done("");
    Built::parse(&finished.stdout).program(package)
}

/// Builds the benchmark `name` of a package, which the feature `__tests` enables.
///
/// # Errors
/// The benchmark does not compile.
pub async fn bench(session: &Session, package: &str, name: &str) -> Result<PathBuf> {
    let args = ["build", "--profile=bench", "--package", package, "--bench", name, "--features", "__tests"];
    let title = format!("build the benchmark {name} of {package}");
    programs(session, &title, &args).await?.program(name)
}

/// Builds static programs with these arguments to cargo, as a step with the title `title`.
///
/// # Errors
/// The programs do not compile.
pub async fn programs(session: &Session, title: &str, args: &[&str]) -> Result<Built> {
    let root = session.workspace.root();
    let _turn = session.turn_to_compile().await;
    let step = session.progress.step(title);
    let built = run(program(root), root, &step, args).await?;
    step.done("");
    Ok(built)
}

/// The result of a cargo build.
pub struct Built(Vec<Artifact>);

impl Built {
    /// Reads the messages of cargo with `--message-format json-render-diagnostics`.
    pub(crate) fn parse(messages: &str) -> Built {
        Built(artifacts(messages))
    }

    /// Returns the path of the program of this name.
    ///
    /// # Errors
    /// Cargo built no program of this name.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let found = self.0.iter().find(|artifact| artifact.target.name == name);
        let path = found.and_then(|artifact| artifact.executable.clone());
        path.with_context(|| format!("cargo built no program called {name}"))
    }

    /// Returns the path of the test binary `tests/<name>` of a package.
    ///
    /// # Errors
    /// Cargo did not build it.
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

async fn run(cargo: Program, root: &Path, step: &Step, args: &[&str]) -> Result<Built> {
    let notes = step.notes();
    let (command, rest) = args.split_first().context("no cargo command")?;
    let finished = linked_statically(cargo, root, command)
        .await?
        .args(["--message-format", "json-render-diagnostics"])
        .args(rest.iter().copied())
        .on_stderr_line(move |line| notes.note(line.trim().to_owned()))
        .run()
        .await?;
    Ok(Built::parse(&finished.stdout))
}

async fn linked_statically(cargo: Program, root: &Path, command: &str) -> Result<Program> {
    // With an explicit target, cargo does not pass the flags to build scripts and procedural macros.
    let target = host_triple(root).await?;
    Ok(cargo.arg(command).args(["--target", &target]).env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS))
}

/// Returns cargo in the workspace, without the variables that the outer cargo set for the package of
/// this program. Build scripts that depend on such variables would run again each time.
#[must_use]
pub fn program(workspace: &Path) -> Program {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    in_workspace(Program::new(cargo), workspace)
}

/// Has a program that runs cargo work in the workspace, without the variables of the outer cargo.
#[must_use]
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
///
/// # Errors
/// rustc does not know the target, or does not run.
pub async fn has_target(session: &Session, triple: &str) -> Result<bool> {
    let printed = rustc(session.workspace.root(), &["--print", "target-libdir", "--target", triple]).await?;
    Ok(Path::new(printed.trim()).is_dir())
}

async fn host_triple(workspace: &Path) -> Result<String> {
    let version = rustc(workspace, &["-vV"]).await?;
    version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("rustc -vV names no host")
}

/// Returns the output of rustc with these arguments.
pub(crate) async fn rustc(workspace: &Path, args: &[&str]) -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    Ok(Program::new(rustc).args(args.iter().copied()).current_dir(workspace).run().await?.stdout)
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
