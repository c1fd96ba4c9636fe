//! Builds programs from pinned Go modules. The recipe is a `go.mod` with `tool` lines and its `go.sum`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::Recipe;
use crate::process::{Finished, Program};
use crate::session::Session;

/// A directory of [`Workspace::definitions`](crate::session::Workspace::definitions) whose `tool` lines name the programs to build.
#[derive(Clone, Copy, Debug)]
pub struct GoModule {
    /// The name of the directory and of the artifact in the cache.
    pub name: &'static str,
    /// The required module whose version the programs have.
    pub versioned_by: &'static str,
    /// The `-X` variables that are set to parts of that version.
    pub version_variables: &'static [VersionVariable],
    /// Programs whose package path ends in another name than the one users know: (built name, final name).
    pub renamed: &'static [(&'static str, &'static str)],
    /// The remedy for a user without Go.
    pub without_go: Option<&'static str>,
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

/// Builds the module's programs or takes them from the cache, and returns their directory.
///
/// # Errors
/// Go is missing or too old, a module cannot be fetched, or the build fails.
pub async fn build(session: &Session, module: &GoModule) -> Result<PathBuf> {
    let source = session.workspace.definitions().join(module.name);
    let go_mod = source.join("go.mod");
    let text = std::fs::read_to_string(&go_mod).with_context(|| format!("read {}", go_mod.display()))?;
    let version = required_version(&text, module.versioned_by)
        .with_context(|| format!("{} requires no {}", go_mod.display(), module.versioned_by))?;
    let toolchain = toolchain(&source, &text).await.with_context(|| {
        let otherwise = module.without_go.map(|what| format!("; {what}")).unwrap_or_default();
        format!("building {} {version} takes Go (https://go.dev/dl){otherwise}", module.name)
    })?;
    let linker_flags = linker_flags(module, &version);
    let recipe = Recipe::new(module.name, 1)
        .with("go.mod", &text)
        .with_file("go.sum", &source.join("go.sum"))?
        .with("toolchain", &toolchain)
        .with("target", std::env::consts::ARCH)
        .with("linker flags", &linker_flags);
    session
        .cache
        .artifact(&recipe, async |out: &Path| {
            let step = session.progress.step(format!("build {} {version} ({toolchain})", module.name));
            let notes = step.notes();
            let mut packages = 0;
            go(&source)
                .args(["build", "-v", "-trimpath", "-ldflags", &linker_flags, "-o"])
                .arg(out)
                .arg("tool")
                .on_stderr_line(move |line| match line.strip_prefix("go: downloading ") {
                    Some(module) => notes.note(format!("fetching {module}")),
                    None => {
                        packages += 1;
                        notes.note(format!("{packages} packages, {line}"));
                    }
                })
                .run()
                .await?;
            for (built, called) in module.renamed {
                std::fs::rename(out.join(built), out.join(called))
                    .with_context(|| format!("call the program {built} of {} {called}", module.name))?;
            }
            step.done("");
            Ok(())
        })
        .await
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
    Program::new("go")
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
    fn the_version_reaches_the_linker() {
        let module = GoModule {
            name: "x",
            versioned_by: "y",
            version_variables: &[VersionVariable { variable: "a.b", value: |v| v.to_string() }],
            renamed: &[],
            without_go: None,
        };
        let version = Version { major: 1, minor: 2, patch: 3 };
        assert_eq!(linker_flags(&module, &version), "-s -w -X a.b=v1.2.3");
    }
}
