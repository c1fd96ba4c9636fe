//! `cargo harness deb`: Debian packages of the driver, for nodes that run it as services of systemd. `csi/Cargo.toml` says what is in
//! them (`package.metadata.deb`), and cargo-deb writes them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cargo_tool::CargoTool;
use testvm::process::Program;
use testvm::session::Session;
use testvm::{cache, rust_build};

use crate::programs::{Compilers, TARGETS, Target, programs};
use crate::sources::{Sources, VERSION, checkout};

const CARGO_DEB: CargoTool = CargoTool { name: "cargo-deb", version: "3.8.0" };

/// The program that writes the man pages and completions, and their directory beside the programs.
const TOOL: &str = "loopfs";
const MANUAL: &str = "manual";
/// The crates of the services. Each has an example that writes the man pages of its program.
const SERVICES: [(&str, &str); 2] =
    [("csi", "loopfs-csi-manual"), ("provisioner", "loopfs-provisioner-manual")];
/// The crate whose manifest describes the package.
const CRATE: &str = "csi";
/// The revision of the package, of which there is one for each version of the programs.
const REVISION: &str = "1";
/// The time of all files of a package, in seconds since 1970: the year 1980. Two builds of the same sources are then the same.
const TIME: &str = "315532800";

/// Writes a Debian package of the driver for amd64 and for arm64: both programs as services of systemd, and the tool loopfs.
#[derive(Debug, clap::Args)]
pub struct DebArgs {
    /// The directory to write to, instead of target/deb.
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
}

/// Builds the packages of this checkout, and prints their paths.
///
/// # Errors
/// The programs do not compile for a platform, or a package cannot be written.
pub async fn deb(session: &Session, args: DebArgs) -> Result<()> {
    let directory = args.out.unwrap_or_else(|| session.workspace.target().join("deb"));
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let sources = checkout(session).await?;
    let packages = build(session, &sources, &directory).await?;
    session.progress.finish();
    for package in packages {
        println!("{}", directory.join(package).display());
    }
    Ok(())
}

/// Builds the programs of `sources` for each platform and packs them into `directory`. Returns the names of the packages.
///
/// # Errors
/// The programs do not compile for a platform, or a package cannot be written.
pub(crate) async fn build(session: &Session, sources: &Sources, directory: &Path) -> Result<Vec<String>> {
    let compilers = Compilers::prepare(session).await?;
    let mut built = Vec::new();
    for target in &TARGETS {
        let files = programs(session, &compilers, sources, target).await?;
        built.push((target, files.into_iter().map(|(_, program)| program).collect::<Vec<_>>()));
    }
    let native = built.iter().find(|(target, _)| target.is_native());
    let (_, native) = native.context("no package is for this machine, which has to write the man pages")?;
    let mut names = Vec::new();
    for (target, programs) in &built {
        let name = file_name(target);
        pack(session, &sources.root, target, [programs, native], &directory.join(&name)).await?;
        names.push(name);
    }
    Ok(names)
}

/// Packs programs for this machine into the package `out`. Returns the name that Debian gives the file.
///
/// # Errors
/// No package is for this machine, a program is missing, or the package cannot be written.
pub async fn pack_for_this_machine(session: &Session, programs: &[PathBuf], out: &Path) -> Result<String> {
    let root = session.workspace.root();
    let target = TARGETS.iter().find(|target| target.is_native()).context("no package for this machine")?;
    pack(session, root, target, [programs, programs], out).await?;
    Ok(file_name(target))
}

/// Packs programs of a platform into the package `out`. `native` are the same programs for this machine. The tool among them writes the
/// man pages.
async fn pack(
    session: &Session,
    root: &Path,
    target: &Target,
    [programs, native]: [&[PathBuf]; 2],
    out: &Path,
) -> Result<()> {
    let cargo_deb = CARGO_DEB.prepare(session).await?;
    let step = session.progress.step(format!("pack {}", out.display()));
    // cargo-deb finds the programs in the directory to which cargo would have built them.
    let staged = session.workspace.target().join("deb-programs");
    let built = staged.join(target.triple).join("release");
    cache::empty_dir(&built)?;
    for program in programs {
        let name = program.file_name().with_context(|| format!("{} is no program", program.display()))?;
        fs::copy(program, built.join(name)).with_context(|| format!("copy {}", program.display()))?;
    }
    let tool = native.iter().find(|program| program.ends_with(TOOL));
    let tool = tool.with_context(|| format!("the package has no program {TOOL}"))?;
    let manual = built.join(MANUAL);
    Program::new(tool).arg("manual").arg(&manual).run().await.context("write the man pages of the tool")?;
    for (package, example) in SERVICES {
        rust_build::program(root)
            .args(["run", "--quiet", "--locked", "--package", package, "--example", example, "--"])
            .arg(&manual)
            .run()
            .await
            .with_context(|| format!("write the man pages of the crate {package}"))?;
    }
    rust_build::in_workspace(Program::new(cargo_deb), root)
        .args(["--no-build", "--no-strip", "--locked", "--quiet", "--package", CRATE])
        .args(["--target", target.triple, "--deb-revision", REVISION, "--output"])
        .arg(out)
        .env("CARGO_TARGET_DIR", &staged)
        .env("SOURCE_DATE_EPOCH", TIME)
        .run()
        .await
        .with_context(|| format!("pack {}", out.display()))?;
    step.done("");
    Ok(())
}

/// Returns the name that Debian gives the file of a package.
fn file_name(target: &Target) -> String {
    format!("loopfs_{VERSION}-{REVISION}_{}.deb", target.architecture)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the values of a setting in a unit, which may be given several times.
    fn values<'a>(unit: &'a str, setting: &str) -> Vec<&'a str> {
        let lines = unit.lines().filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
        lines.flat_map(str::split_whitespace).collect()
    }

    fn read(path: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        fs::read_to_string(root.join(path)).unwrap()
    }

    #[test]
    fn provisioner_runs_without_capabilities() {
        let unit = read("csi/debian/loopfs-provisioner.service");
        assert!(unit.lines().any(|line| line == "CapabilityBoundingSet="));
        assert!(values(&unit, "CapabilityBoundingSet").is_empty());
        let [user] = values(&unit, "User")[..] else { panic!("{unit}") };
        let directories = read("csi/debian/loopfs.tmpfile");
        for directory in ["/run/loopfs", "/etc/loopfs"] {
            let line = format!("d {directory} 2750 root {user}");
            assert!(directories.lines().any(|other| other == line), "{directories}");
        }
    }

    /// No setting of its unit creates a private mount namespace, or gives the new directories of the store a group.
    #[test]
    fn driver_is_not_isolated_from_its_host() {
        let unit = read("csi/debian/loopfs-csi.service");
        let isolating =
            ["Private", "Protect", "ReadOnly", "ReadWrite", "Inaccessible", "Bind", "Root", "TemporaryFile"];
        let is_found = |line: &&str| {
            line.starts_with("Group=") || isolating.iter().any(|prefix| line.starts_with(prefix))
        };
        assert_eq!(unit.lines().find(is_found), None);
    }

    /// Returns the names of the options that lines of a manifest or of a unit have, such as `--data-dir`.
    fn options<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
        let words = lines.map(|line| line.trim_start().trim_start_matches("- "));
        words.filter_map(|word| Some(word.split_once('=')?.0).filter(|name| name.starts_with("--"))).collect()
    }

    /// An option that only one of the two has is easily forgotten in the other.
    #[test]
    fn service_and_container_options_match() {
        // The services have their names in the environment, and no kubelet probes them.
        const OF_THE_CONTAINER: [&str; 3] = ["--driver-name", "--node-name", "--probe-address"];
        let manifest = read("csi/deploy/daemonset.yaml");
        for (name, of_the_service) in [("csi", [].as_slice()), ("provisioner", &["--kubeconfig"])] {
            let (_, container) = manifest.split_once(&format!("        - name: {name}\n")).unwrap();
            let mut expected = options(container.lines().take_while(|line| !line.starts_with("        - ")));
            for option in OF_THE_CONTAINER {
                assert!(expected.remove(option), "the container {name} has no {option}");
            }
            expected.extend(of_the_service);
            let unit = read(&format!("csi/debian/loopfs-{name}.service"));
            assert_eq!(
                options(unit.lines()),
                expected,
                "{name}: the service (left) and the container (right)"
            );
            // Without braces, systemd splits the variable at spaces.
            let others = format!(" \\\n    ${}_OPTIONS\n", name.to_uppercase());
            assert!(unit.contains(&others), "{name}: an administrator cannot add other options: {unit}");
        }
    }

    #[test]
    fn commented_settings_have_default_values() {
        let settings = read("csi/debian/default");
        let units = ["csi", "provisioner"].map(|name| read(&format!("csi/debian/loopfs-{name}.service")));
        let defaults: Vec<&str> = units.iter().flat_map(|unit| values(unit, "Environment")).collect();
        let uncommented = settings.lines().filter_map(|line| line.strip_prefix('#'));
        for line in uncommented.filter(|line| line.starts_with(char::is_uppercase)) {
            // The host name, and what the programs themselves have as their default.
            let by_program = ["NODE_NAME=", "NODE_LOSS=dry-run", "CLAIM_LABELS=", "LOG_LEVEL=info"];
            assert!(defaults.contains(&line) || by_program.contains(&line), "{line}");
        }
    }
}
