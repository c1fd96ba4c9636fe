//! Checks of the dependencies, for the unit lane: their licences and sources, known vulnerabilities, the Rust version that they
//! need, and that crates can be published with them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm::cargo_tool::CargoTool;
use testvm::process::{Finished, Program};
use testvm::report::{Outcome, Report};
use testvm::rust_build;
use testvm::session::Session;

use super::checks::{self, SUITE};

/// Reads deny.toml.
pub(super) const CARGO_DENY: CargoTool = CargoTool { name: "cargo-deny", version: "0.20.2" };
/// The check that needs only the registry.
const POLICY: [&str; 3] = ["bans", "licenses", "sources"];
const ADVISORIES: &str = "advisories of dependencies";
/// What cargo-deny prints if it cannot fetch the database of advisories.
const NO_DATABASE: &str = "failed to fetch advisory database";
/// The limit for fetching that database. A network that drops packets would otherwise block the lane.
const ADVISORIES_TIMEOUT: Duration = Duration::from_secs(120);

/// Crates that others must not depend on, directly or not. The library uses only the kernel. With an async runtime, each static build of
/// PID 1 of the virtual machines would take minutes instead of seconds.
const UPPER_LAYERS: [(&str, &[&str]); 2] = [
    ("loopfs", &["anyhow", "clap", "kube", "serde", "serde_json", "tokio", "tonic"]),
    ("testvm-guest", &["kube", "testvm", "tokio"]),
];

/// The part of `cargo metadata` that the checks need.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    rust_version: Option<String>,
    /// The registries to which the crate may be published: `None` for all, and an empty list for none.
    publish: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Debug, Deserialize)]
struct DependencyKind {
    /// `dev`, `build`, or `None` for a normal dependency.
    kind: Option<String>,
}

/// Runs the checks.
pub(super) async fn check(session: &Session, report: &mut Report) {
    deny(session, report).await;
    let Some(metadata) = report.run(SUITE, "metadata of the crates", metadata(session)).await else { return };
    let newer = newer_dependencies(&metadata);
    require_none(report, "rust-version of each crate", "raise rust-version, or lower a dependency", &newer);
    let upper = upper_layers(&metadata, &UPPER_LAYERS);
    require_none(report, "layers of the crates", "a crate depends on a layer above it", &upper);
    let versions: BTreeSet<&String> =
        metadata.members().filter_map(|package| package.rust_version.as_ref()).collect();
    for version in versions {
        let packages = metadata.members().filter(|package| package.rust_version.as_ref() == Some(version));
        let packages: Vec<&str> = packages.map(|package| package.name.as_str()).collect();
        build_with(session, report, version, &packages).await;
    }
    for package in metadata.members().filter(|package| package.publish.is_none()) {
        let name = format!("package of {}", package.name);
        // In a checkout with changes, too. Cargo compiles the package as those who depend on it do.
        let args = format!("package --package {} --allow-dirty", package.name);
        checks::cargo(session, report, &name, &args).await;
    }
}

/// Adds a case that fails if there are lines.
fn require_none(report: &mut Report, name: &str, remedy: &str, lines: &[String]) {
    let outcome = match lines {
        [] => Outcome::Passed,
        lines => Outcome::Failed(format!("{remedy}:\n{}", lines.join("\n"))),
    };
    report.push(SUITE, name, outcome, None);
}

/// Runs cargo-deny: what it can check without the database of advisories, and that.
async fn deny(session: &Session, report: &mut Report) {
    const NAME: &str = "licences, bans and sources of dependencies";
    let root = session.workspace.root();
    let program = match session.until_cancelled(CARGO_DENY.prepare(session)).await {
        Ok(program) => program,
        Err(error) => return report.record::<()>(SUITE, NAME, None, &Err(error)),
    };
    let deny = || Program::new(&program).downloads().current_dir(root).args(["--locked", "check"]);
    checks::check(session, report, NAME, deny().args(POLICY)).await;

    // Git must not ask for a password.
    let advisories = deny().arg("advisories").env("GIT_TERMINAL_PROMPT", "0");
    let started = Instant::now();
    let checked =
        tokio::time::timeout(ADVISORIES_TIMEOUT, checks::run(session, ADVISORIES, advisories)).await;
    let outcome = match checked {
        Ok((Ok(finished), _)) => advisories_outcome(&finished),
        Ok((Err(error), _)) => Outcome::Failed(format!("{error:#}")),
        Err(_) => Outcome::Unavailable(format!(
            "the database of advisories was not fetched within {ADVISORIES_TIMEOUT:?}; run `cargo deny check advisories` \
             where its Git repository can be reached"
        )),
    };
    report.push(SUITE, ADVISORIES, outcome, started.elapsed());
}

/// Returns the outcome of the check of advisories. Its database is a Git repository that no package registry has, so a
/// machine may be unable to fetch it.
fn advisories_outcome(finished: &Finished) -> Outcome {
    if finished.status.success() {
        Outcome::Passed
    } else if finished.stderr.contains(NO_DATABASE) {
        Outcome::Unavailable(
            "the Git repository of the database of advisories cannot be reached from here; run `cargo deny check \
             advisories` where it can"
                .to_owned(),
        )
    } else {
        Outcome::Failed(finished.failure())
    }
}

/// Compiles crates with the oldest Rust that they promise to support, if rustup has it.
async fn build_with(session: &Session, report: &mut Report, version: &str, packages: &[&str]) {
    let name = format!("build with Rust {version}");
    let root = session.workspace.root();
    let rustup = || Program::new("rustup").downloads().current_dir(root).args(["run", version]);
    let installed = rustup().args(["rustc", "--version"]).finish().await;
    if !installed.is_ok_and(|finished| finished.status.success()) {
        let reason = format!("it is not installed: rustup toolchain install {version}");
        report.push(SUITE, &name, Outcome::Unavailable(reason), None);
        return;
    }
    let packages = packages.iter().flat_map(|package| ["--package", package]);
    // The variables of the outer cargo name another toolchain.
    let check = rustup()
        .args(["cargo", "check", "--locked"])
        .args(packages)
        .env_remove("CARGO")
        .env_remove("RUSTC")
        .env_remove("RUSTUP_TOOLCHAIN");
    checks::check(session, report, &name, check).await;
}

async fn metadata(session: &Session) -> Result<Metadata> {
    let cargo = rust_build::program(session.workspace.root());
    let printed = cargo.args(["metadata", "--format-version", "1", "--locked"]).run().await?.stdout;
    serde_json::from_str(&printed).context("parse the output of cargo metadata")
}

impl Metadata {
    fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id))
    }

    /// Returns the packages that are compiled for a package, without itself. Dependencies of tests do not count: who uses a crate does not
    /// compile them.
    fn dependencies<'m>(&'m self, of: &'m Package) -> impl Iterator<Item = &'m Package> {
        let mut seen = BTreeSet::new();
        let mut open = vec![of.id.as_str()];
        while let Some(id) = open.pop() {
            let nodes = self.resolve.nodes.iter().filter(|node| node.id == id);
            let compiled = nodes.flat_map(|node| &node.deps).filter(|dependency| {
                dependency.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"))
            });
            open.extend(compiled.map(|dependency| dependency.pkg.as_str()).filter(|id| seen.insert(*id)));
        }
        self.packages.iter().filter(move |package| seen.contains(package.id.as_str()))
    }
}

/// Returns a line for each dependency that needs a newer Rust than the crate of the workspace that uses it.
fn newer_dependencies(metadata: &Metadata) -> Vec<String> {
    let mut lines = Vec::new();
    for package in metadata.members() {
        let promised = package.rust_version.as_deref().unwrap_or_default();
        let Some(oldest) = parse(promised) else {
            lines.push(format!("{} has no rust-version", package.name));
            continue;
        };
        for dependency in metadata.dependencies(package) {
            let needed = dependency.rust_version.as_deref();
            if let Some(needed) = needed.filter(|needed| parse(needed) > Some(oldest)) {
                lines.push(format!(
                    "{} has rust-version {promised}, and its dependency {} {} needs {needed}",
                    package.name, dependency.name, dependency.version
                ));
            }
        }
    }
    lines
}

/// Returns a line for each dependency of a crate on a layer above it.
fn upper_layers(metadata: &Metadata, layers: &[(&str, &[&str])]) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, upper) in layers {
        let Some(package) = metadata.members().find(|package| package.name == *name) else {
            lines.push(format!("the workspace has no crate {name}"));
            continue;
        };
        let dependencies = metadata.dependencies(package).map(|dependency| dependency.name.as_str());
        let wrong = dependencies.filter(|dependency| upper.contains(dependency));
        lines.extend(wrong.map(|dependency| format!("{name} depends on {dependency}")));
    }
    lines
}

/// Returns the numbers of a version such as `1.88` or `1.88.0`.
fn parse(version: &str) -> Option<[u32; 3]> {
    let mut numbers = version.split('.').map(str::parse);
    let mut next = || numbers.next().unwrap_or(Ok(0)).ok();
    Some([next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{
        "packages": [
            {"id": "a", "name": "library", "version": "0.1.0", "rust_version": "1.88", "publish": null},
            {"id": "b", "name": "driver", "version": "0.1.0", "rust_version": "1.89", "publish": []},
            {"id": "c", "name": "client", "version": "5.0.0", "rust_version": "1.89.0", "publish": null},
            {"id": "d", "name": "checker", "version": "2.0.0", "rust_version": "1.91", "publish": null},
            {"id": "e", "name": "old", "version": "1.0.0", "rust_version": null, "publish": null}
        ],
        "workspace_members": ["a", "b"],
        "resolve": {"nodes": [
            {"id": "a", "deps": [{"pkg": "e", "dep_kinds": [{"kind": null}]}]},
            {"id": "b", "deps": [
                {"pkg": "a", "dep_kinds": [{"kind": null}]},
                {"pkg": "c", "dep_kinds": [{"kind": "build"}]},
                {"pkg": "d", "dep_kinds": [{"kind": "dev"}]}
            ]},
            {"id": "e", "deps": []}
        ]}
    }"#;

    fn metadata() -> Metadata {
        serde_json::from_str(METADATA).unwrap()
    }

    #[test]
    fn dependencies_on_upper_layers_are_reported() {
        let metadata = metadata();
        assert_eq!(upper_layers(&metadata, &[("library", &["client"]), ("driver", &["checker"])]), [""; 0]);
        let wrong = [("driver", &["old"][..]), ("tool", &["old"])];
        assert_eq!(
            upper_layers(&metadata, &wrong),
            ["driver depends on old", "the workspace has no crate tool"]
        );
    }

    /// Dependencies of tests may need a newer Rust than their crate.
    #[test]
    fn too_new_dependencies_are_reported() {
        let mut metadata = metadata();
        assert_eq!(newer_dependencies(&metadata), Vec::<String>::new());
        metadata.packages[4].rust_version = Some("1.90".into());
        let lines = newer_dependencies(&metadata);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("library") && lines[0].contains("old 1.0.0 needs 1.90"), "{lines:?}");
    }

    #[test]
    fn crate_without_rust_version_is_reported() {
        let mut metadata = metadata();
        metadata.packages[0].rust_version = None;
        assert_eq!(newer_dependencies(&metadata), ["library has no rust-version"]);
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(parse("1.88"), parse("1.88.0"));
        assert!(parse("1.100") > parse("1.89.3"));
        assert_eq!(parse("nightly"), None);
    }
}
