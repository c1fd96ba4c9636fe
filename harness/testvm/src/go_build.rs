//! Builds programs from pinned Go modules. The recipe is a `go.mod` with `tool` lines and its `go.sum`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::cache::Recipe;
use crate::process::{Finished, Program};
use crate::progress::Step;
use crate::session::Session;

/// A directory of [`Workspace::definitions`](crate::session::Workspace::definitions) whose `tool` lines name the programs to build.
#[derive(Clone, Copy, Debug)]
pub struct GoModule {
    /// The path of the directory. Its first component is the name of the artifact in the cache, so that the versions of
    /// one program can have directories in a common one.
    pub name: &'static str,
    /// The required module whose version the programs have.
    pub versioned_by: &'static str,
    /// The `-X` variables that are set to parts of that version.
    pub version_variables: &'static [VersionVariable],
    /// Programs whose package path ends in another name than the one users know: (built name, final name).
    pub renamed: &'static [(&'static str, &'static str)],
    /// The changes of its sources, if it is not built as it is.
    pub overlay: Option<Overlay>,
}

/// Changes of the sources of Go modules, for `go build -overlay`. A Go program writes the changed copies when they
/// are needed, so that no source of others is kept.
#[derive(Clone, Copy, Debug)]
pub struct Overlay {
    /// The name of the artifact in the cache.
    pub artifact: &'static str,
    /// The directory of the program, in the directory of the module. The program is a Go module of its own.
    /// Called in the directory of `go.mod` as `PROGRAM OUTPUT MODULE=DIRECTORY..`, it writes the copies,
    /// `overlay.json`, and a `go.mod` for `-modfile` into the directory OUTPUT. It fails if a source is not as it
    /// expects.
    pub rewriter: &'static str,
    /// The modules that it changes.
    pub modules: &'static [&'static str],
    /// The packages to build, rather than the `tool` lines.
    pub packages: &'static [&'static str],
}

/// A string variable of the linked program, and the part of the version that it is set to.
#[derive(Clone, Copy, Debug)]
pub struct VersionVariable {
    /// The variable with the path of its package.
    pub variable: &'static str,
    /// Returns its value for a version.
    pub value: fn(&Version) -> String,
}

/// The version of a module, such as `v1.36.3`.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "v{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// Parses `v1.36.3`, `go1.26.8` or `1.26.0`, and ignores the text after the numbers.
    #[must_use]
    pub fn parse(text: &str) -> Option<Version> {
        let numbers = text.trim_start_matches(|c: char| !c.is_ascii_digit());
        let mut numbers = numbers.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        let mut next = || numbers.next().and_then(Result::ok);
        Some(Version { major: next()?, minor: next()?, patch: next().unwrap_or(0) })
    }
}

impl GoModule {
    /// Returns a module that is built as it is: the programs have no version, and the names of their directories.
    #[must_use]
    pub const fn new(name: &'static str, versioned_by: &'static str) -> GoModule {
        GoModule { name, versioned_by, version_variables: &[], renamed: &[], overlay: None }
    }

    fn artifact(&self) -> &'static str {
        self.name.split_once('/').map_or(self.name, |(first, _)| first)
    }
}

/// Builds the module's programs or takes them from the cache, and returns their directory.
pub async fn build(session: &Session, module: &GoModule) -> Result<PathBuf> {
    let pinned = Pinned::read(session, module).await?;
    pinned.report(session, module);
    let name = module.overlay.map_or(module.artifact(), |overlay| overlay.artifact);
    let mut recipe = pinned.recipe(name)?;
    for (built, called) in module.renamed {
        recipe = recipe.with("built", built).with("called", called);
    }
    if let Some(overlay) = &module.overlay {
        recipe = recipe.with("packages", overlay.packages.join(" "));
        recipe = with_directory(recipe, &pinned.source.join(overlay.rewriter))?;
    }
    session
        .cache
        .artifact(&recipe, async |out: &Path| {
            let step = pinned.step(session, name);
            let scratch = tempfile::tempdir().context("create a temporary directory")?;
            let mut build = pinned.go(&["build"]).arg("-o").arg(out);
            build = match &module.overlay {
                Some(overlay) => {
                    let written = write_overlay(&pinned.source, overlay, scratch.path()).await?;
                    let build = build.arg("-modfile").arg(written.join("go.mod"));
                    build.arg("-overlay").arg(written.join("overlay.json")).args(overlay.packages)
                }
                None => build.arg("tool"),
            };
            run(build, &step).await?;
            for (built, called) in module.renamed {
                std::fs::rename(out.join(built), out.join(called))
                    .with_context(|| format!("call the program {built} of {} {called}", module.name))?;
            }
            step.done("");
            Ok(())
        })
        .await
}

/// The sources of a module, which are read-only.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub struct Sources {
    #[serde(rename = "Dir")]
    pub directory: PathBuf,
    /// The checksum of the module's contents, as in `go.sum`.
    #[serde(rename = "Sum")]
    pub checksum: String,
}

/// Builds the tests of a package that the module requires, as one program, or takes it from the cache, and returns its
/// path: `LAST_PART_OF_PACKAGE.test` in a directory of its own.
pub async fn build_tests(session: &Session, module: &GoModule, package: &str) -> Result<PathBuf> {
    let pinned = Pinned::read(session, module).await?;
    pinned.report(session, module);
    let program = format!("{}.test", package.rsplit('/').next().unwrap_or(package));
    let name = format!("{}-tests", module.artifact());
    let recipe = pinned.recipe(&name)?.with("package", package);
    let directory = session
        .cache
        .artifact(&recipe, async |out: &Path| {
            let step = pinned.step(session, &program);
            run(pinned.go(&["test", "-c", "-vet=off"]).arg("-o").arg(out.join(&program)).arg(package), &step)
                .await?;
            step.done("");
            Ok(())
        })
        .await?;
    Ok(directory.join(program))
}

/// A module with all that the cache key of its programs depends on.
struct Pinned {
    source: PathBuf,
    /// The content of `go.mod`.
    go_mod: String,
    version: Version,
    toolchain: String,
    linker_flags: String,
}

impl Pinned {
    async fn read(session: &Session, module: &GoModule) -> Result<Pinned> {
        let source = session.workspace.definitions().join(module.name);
        let (go_mod, version) = go_mod(session, module)?;
        let toolchain = toolchain(&source, &go_mod).await.with_context(|| {
            format!("building {} {version} takes Go (https://go.dev/dl)", module.artifact())
        })?;
        let linker_flags = linker_flags(module, &version);
        Ok(Pinned { source, go_mod, version, toolchain, linker_flags })
    }

    fn recipe(&self, name: &str) -> Result<Recipe> {
        Ok(Recipe::new(name, 1)
            .with("go.mod", &self.go_mod)
            .with_file("go.sum", &self.source.join("go.sum"))?
            .with("toolchain", &self.toolchain)
            .with("target", std::env::consts::ARCH)
            .with("linker flags", &self.linker_flags))
    }

    fn report(&self, session: &Session, module: &GoModule) {
        let version = format!("{} {}", module.versioned_by, self.version);
        let summary = format!("{version}, {}", self.toolchain);
        session.use_version(module.name, vec![version, self.toolchain.clone()], &summary);
    }

    fn step(&self, session: &Session, name: &str) -> Step {
        session.progress.step(format!("build {name} {} ({})", self.version, self.toolchain))
    }

    /// Returns a command of Go with the flags that all builds have.
    fn go(&self, command: &[&str]) -> Program {
        go(&self.source).args(command).args(["-v", "-trimpath", "-ldflags", &self.linker_flags])
    }
}

/// Runs a build and shows its progress.
async fn run(build: Program, step: &Step) -> Result<()> {
    let note = step.notes();
    let mut packages = 0;
    build
        .on_stderr_line(move |line| match line.strip_prefix("go: downloading ") {
            Some(module) => note(format!("fetching {module}")),
            None => {
                packages += 1;
                note(format!("{packages} packages, {line}"));
            }
        })
        .run()
        .await
        .map(drop)
}

/// Returns the sources of a module that `module` requires.
pub async fn sources(session: &Session, module: &GoModule, required: &str) -> Result<Sources> {
    let source = session.workspace.definitions().join(module.name);
    let downloaded = go(&source).args(["mod", "download", "-json", required]).run().await?.stdout;
    serde_json::from_str(&downloaded)
        .with_context(|| format!("find the sources of {required} in {downloaded:?}"))
}

/// Runs the rewriter of `overlay` for the modules that `source/go.mod` requires, and returns its output directory in
/// `scratch`.
async fn write_overlay(source: &Path, overlay: &Overlay, scratch: &Path) -> Result<PathBuf> {
    let program = scratch.join("rewriter");
    go(&source.join(overlay.rewriter))
        .args(["build", "-trimpath", "-o"])
        .arg(&program)
        .arg(".")
        .run()
        .await?;
    let mut modules = Vec::new();
    for module in overlay.modules {
        let listed = go(source).args(["list", "-m", "-f", "{{.Dir}}", module]).run().await?.stdout;
        let directory = listed.trim();
        anyhow::ensure!(!directory.is_empty(), "go.mod of {} requires no {module}", source.display());
        modules.push(format!("{module}={directory}"));
    }
    // Its message names the file, the function and what it expected there.
    let out = scratch.join("overlay");
    let rewriter = in_module(Program::new(program), source).arg(&out).args(&modules).run().await;
    rewriter
        .with_context(|| format!("change the sources of {}, so nothing was built", modules.join(" and ")))?;
    Ok(out)
}

/// Adds the name and the content of every file below a directory.
fn with_directory(mut recipe: Recipe, directory: &Path) -> Result<Recipe> {
    let entries = std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        recipe = match path.is_dir() {
            true => with_directory(recipe.with("directory", name), &path)?.with("end of directory", name),
            false => recipe.with("file", name).with_file("content", &path)?,
        };
    }
    Ok(recipe)
}

/// Returns the version that the programs of a module have.
///
/// # Errors
/// `go.mod` cannot be read, or does not require [`GoModule::versioned_by`].
pub fn pinned_version(session: &Session, module: &GoModule) -> Result<Version> {
    go_mod(session, module).map(|(_, version)| version)
}

fn go_mod(session: &Session, module: &GoModule) -> Result<(String, Version)> {
    let path = session.workspace.definitions().join(module.name).join("go.mod");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let version = required_version(&text, module.versioned_by);
    let version =
        version.with_context(|| format!("{} requires no {}", path.display(), module.versioned_by))?;
    Ok((text, version))
}

/// Returns the version of a module that `go.mod` requires.
#[must_use]
pub fn required_version(go_mod: &str, module: &str) -> Option<Version> {
    go_mod.lines().find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        (words.next()? == module).then(|| Version::parse(words.next()?)).flatten()
    })
}

/// Returns the toolchain that Go will use for this module, such as `go1.26.8 linux/amd64`.
async fn toolchain(source: &Path, go_mod: &str) -> Result<String> {
    let Finished { stdout, .. } = go(source).args(["env", "GOVERSION", "GOOS", "GOARCH"]).run().await?;
    let words: Vec<&str> = stdout.split_whitespace().collect();
    let [version, os, arch] = words.as_slice() else {
        anyhow::bail!("`go env GOVERSION GOOS GOARCH` answered {stdout:?}");
    };
    // Go before 1.21 neither obeys the `go` line nor downloads the toolchain that it requires.
    let needed = go_mod.lines().find_map(|line| line.strip_prefix("go ")).unwrap_or("1.24");
    let too_old = match (Version::parse(version), Version::parse(needed)) {
        (Some(installed), Some(needed)) => installed < needed,
        // A development toolchain without numbers counts as newer than any release.
        _ => false,
    };
    anyhow::ensure!(!too_old, "{version} is installed, go {needed} or newer is needed");
    Ok(format!("{version} {os}/{arch}"))
}

/// Returns the go command for this machine, without settings of the user's environment for other work.
fn go(source: &Path) -> Program {
    in_module(Program::new("go").downloads(), source)
}

/// Has a program that uses Go run in the directory of a module, without settings of the user's environment for other work.
pub fn in_module(program: Program, source: &Path) -> Program {
    program
        .current_dir(source)
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "-mod=readonly")
        .env("GOWORK", "off")
        .env_remove("GOOS")
        .env_remove("GOARCH")
}

fn linker_flags(module: &GoModule, version: &Version) -> String {
    let variables = module.version_variables.iter();
    let variables = variables.map(|v| format!(" -X {}={}", v.variable, (v.value)(version)));
    std::iter::once("-s -w".to_owned()).chain(variables).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const GO_MOD: &str = "module x\n\ngo 1.26.0\n\nrequire k8s.io/api v0.36.3\n\nrequire (\n\
                          \tk8s.io/kubernetes v1.36.3\n\tk8s.io/kubernetes-extra v9.9.9 // indirect\n)\n";

    #[rstest]
    #[case("k8s.io/kubernetes", Some("v1.36.3"))]
    #[case("k8s.io/api", Some("v0.36.3"))]
    #[case("k8s.io/kube", None)]
    fn the_pinned_version_is_read(#[case] module: &str, #[case] expected: Option<&str>) {
        assert_eq!(required_version(GO_MOD, module).map(|v| v.to_string()).as_deref(), expected);
    }

    #[rstest]
    #[case("go1.26.8", Some((1, 26, 8)))]
    #[case("go1.27rc1", Some((1, 27, 0)))]
    #[case("1.26.0", Some((1, 26, 0)))]
    #[case("devel", None)]
    fn versions_compare_as_numbers(#[case] text: &str, #[case] expected: Option<(u32, u32, u32)>) {
        assert_eq!(Version::parse(text).map(|v| (v.major, v.minor, v.patch)), expected);
        assert!(Version::parse("go1.9") < Version::parse("1.26.0"));
    }

    #[test]
    fn key_depends_on_every_file() {
        let dir = tempfile::tempdir().unwrap();
        let key = || with_directory(Recipe::new("x", 1), dir.path()).unwrap().key();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        std::fs::create_dir(dir.path().join("added")).unwrap();
        let mut keys = vec![key()];
        for (name, text) in
            [("main.go", "1"), ("main.go", "2"), ("added/new.go", "1"), ("added/new.go", "2"), ("b", "")]
        {
            write(name, text);
            keys.push(key());
            assert_eq!(key(), keys[keys.len() - 1]);
        }
        let distinct: std::collections::BTreeSet<&String> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
    }
}
