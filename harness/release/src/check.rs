//! Checks the image for a registry: it is built from two copies of this checkout, and read back.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use flate2::read::ZlibDecoder;
use object::{Object, ObjectSection};
use serde_json::Value;
use testvm::cache;
use testvm::images::oci::index::{self, Contents, PlatformContents};
use testvm::process::{Program, git};
use testvm::report::Report;
use testvm::session::Session;

use crate::image::{self, build};
use crate::programs::{TARGETS, Target};
use crate::sources::{Sources, VERSION};

const SUITE: &str = "image";
/// The directories of the copies. Paths of another length would move what follows them in a program.
const COPIES: [&str; 2] = ["a", "another-directory/b"];
/// Runs programs of aarch64.
const EMULATOR: &str = "qemu-aarch64";
/// The section with the dependencies: JSON, compressed by zlib.
const DEPENDENCIES: &str = ".dep-v0";
/// The section with the path of the dynamic linker, which a static program does not have.
const INTERPRETER: &str = ".interp";

/// Builds the image twice and checks it.
///
/// # Errors
/// The image cannot be built. Failed checks are in the report.
pub async fn check_image(session: &Session) -> Result<Report> {
    let directory = session.workspace.reports("test").join("image");
    cache::empty_dir(&directory)?;
    let started = Instant::now();
    let mut archives = Vec::new();
    for copy in COPIES {
        let copy = directory.join(copy);
        let sources = Sources { root: copy.join("sources"), target_dir: copy.join("target"), revision: None };
        copy_sources(session.workspace.root(), &sources.root).await?;
        let archive = copy.join("image.tar");
        build(session, &sources, &archive).await?;
        // Two builds for two platforms take some GB.
        cache::remove_dir(&sources.target_dir)?;
        archives.push(archive);
    }
    let mut report = Report::new();
    let same = compare(&archives[0], &archives[1]);
    report.record(SUITE, "two checkouts give the same image", started.elapsed(), &same);

    let read = async { index::read(&archives[0]) };
    let Some(contents) = report.run(SUITE, "every blob has its digest and size", read).await else {
        return Ok(report);
    };
    session.progress.line(image::summary(&archives[0], &contents));
    let sizes = async { image::check_sizes(&contents) };
    report.run(SUITE, "no platform is larger than the limit", sizes).await;
    check_platforms(&mut report, &contents).await;
    Ok(report)
}

/// Checks and starts the programs of each platform.
async fn check_platforms(report: &mut Report, contents: &Contents) {
    for target in &TARGETS {
        let check = async {
            let mut platforms = contents.platforms.iter();
            let platform = platforms.find(|platform| platform.architecture == target.architecture);
            let platform = platform.context("the index has no manifest for it")?;
            check_platform(platform, target).map(|()| platform)
        };
        let name = format!("linux/{}: static programs with a list of dependencies", target.architecture);
        let Some(platform) = report.run(SUITE, &name, check).await else { continue };
        let name = format!("linux/{}: the programs start", target.architecture);
        report.run(SUITE, &name, start_programs(platform, target)).await;
    }
}

fn check_platform(platform: &PlatformContents, target: &Target) -> Result<()> {
    let label = platform.labels.get("org.opencontainers.image.version").map(String::as_str);
    anyhow::ensure!(label == Some(VERSION), "the image has the version {label:?}, not {VERSION}");
    let first = platform.entrypoint.first().map(|path| path.trim_start_matches('/'));
    anyhow::ensure!(
        first.is_some_and(|path| platform.files.contains_key(path)),
        "the image has no file for its entrypoint {first:?}"
    );
    for (name, program) in &platform.files {
        check_program(program, target).with_context(|| format!("check the program {name}"))?;
    }
    Ok(())
}

/// Checks what a program says about itself: its architecture, its libraries, and the list of the crates in it.
fn check_program(program: &[u8], target: &Target) -> Result<()> {
    let file = object::File::parse(program).context("parse the ELF file")?;
    let machine = format!("{:?}", file.architecture()).to_lowercase();
    anyhow::ensure!(machine == target.machine, "it is for {machine}, not {}", target.machine);
    let section =
        file.section_by_name(DEPENDENCIES).with_context(|| format!("it has no section {DEPENDENCIES}"))?;
    let list: Value = serde_json::from_reader(ZlibDecoder::new(section.data()?))
        .with_context(|| format!("read the section {DEPENDENCIES}"))?;
    let crates = list["packages"].as_array().context("its list of dependencies has no packages")?;
    let own =
        crates.iter().find(|package| package["root"] == true).context("it does not list its own crate")?;
    anyhow::ensure!(
        own["version"] == VERSION,
        "it lists its own crate as {own}, not with the version {VERSION}"
    );
    let has_library = crates.iter().any(|package| package["name"] == "loopfs");
    anyhow::ensure!(has_library, "it does not list the library loopfs: {list}");
    let is_static = file.section_by_name(INTERPRETER).is_none();
    anyhow::ensure!(is_static, "it needs a dynamic linker, and the image has none");
    Ok(())
}

/// Starts each program, which prints its version and its help.
async fn start_programs(platform: &PlatformContents, target: &Target) -> Result<()> {
    let directory = tempfile::tempdir().context("create a directory")?;
    for (name, content) in &platform.files {
        let path = directory.path().join(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        for option in ["--version", "--help"] {
            let program = match target.is_native() {
                true => Program::new(&path),
                false => Program::new(EMULATOR).arg(&path).named(name),
            };
            let printed = program.arg(option).run().await?.stdout;
            anyhow::ensure!(!printed.trim().is_empty(), "{name} {option} prints nothing");
            anyhow::ensure!(
                option != "--version" || printed.contains(VERSION),
                "{name} --version prints {printed:?}, not {VERSION}"
            );
        }
    }
    Ok(())
}

/// Copies the files of a checkout that Git does not ignore.
async fn copy_sources(root: &Path, to: &Path) -> Result<()> {
    let listed = git(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .run()
        .await
        .context("list the files of the checkout, which must be a Git repository")?;
    // A file that was removed and not committed is still listed.
    let files =
        listed.stdout.split_inclusive('\0').filter(|name| root.join(name.trim_end_matches('\0')).is_file());
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    let copied = Program::new("xargs").args(["--null", "cp", "--parents", "--target-directory"]).arg(to);
    copied.current_dir(root).input(files.collect::<String>()).run().await.map(drop)
}

fn compare(one: &Path, other: &Path) -> Result<()> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    anyhow::ensure!(
        read(one)? == read(other)?,
        "two images of the same sources differ; find the path, time or order that a program depends on: diffoscope {} {}",
        one.display(),
        other.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_without_dependency_list_is_refused() {
        // This test program has none.
        let program = fs::read(std::env::current_exe().unwrap()).unwrap();
        let native = TARGETS.iter().find(|target| target.is_native()).unwrap();
        let error = check_program(&program, native).unwrap_err().to_string();
        assert!(error.contains(DEPENDENCIES), "{error}");
    }
}
