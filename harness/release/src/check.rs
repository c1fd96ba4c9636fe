//! Checks the image for a registry: it is built from two copies of this checkout, and read back.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use testvm::cache;
use testvm::images::oci::index::{self, Contents, PlatformContents};
use testvm::process::{Program, git};
use testvm::report::Report;
use testvm::session::Session;

use crate::image::{self, build};
use crate::program_info::ProgramInfo;
use crate::programs::{TARGETS, Target};
use crate::sources::{Sources, version};

const SUITE: &str = "image";
/// The directories of the copies. Paths of another length would move what follows them in a program.
const COPIES: [&str; 2] = ["a", "another-directory/b"];
/// Runs programs of aarch64.
const EMULATOR: &str = "qemu-aarch64";

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
    session.progress.line(image::summary(&archives[0], &contents.digests));
    let sizes = async { image::check_sizes(&contents.digests) };
    report.run(SUITE, "no platform is larger than the limit", sizes).await;
    let version = version(session.workspace.root())?;
    check_platforms(&mut report, &contents, &version).await;
    Ok(report)
}

/// Checks and starts the programs of each platform.
async fn check_platforms(report: &mut Report, contents: &Contents, version: &str) {
    for target in &TARGETS {
        let check = async {
            let mut platforms = contents.platforms.iter();
            let platform = platforms.find(|platform| platform.architecture == target.architecture);
            let platform = platform.context("the index has no manifest for it")?;
            check_programs(platform, target, version).map(|()| platform)
        };
        let name = format!("linux/{}: static programs with a list of dependencies", target.architecture);
        let Some(platform) = report.run(SUITE, &name, check).await else { continue };
        let name = format!("linux/{}: the programs start", target.architecture);
        report.run(SUITE, &name, start_programs(platform, target, version)).await;
    }
}

/// Checks what the programs say about themselves.
fn check_programs(platform: &PlatformContents, target: &Target, version: &str) -> Result<()> {
    let label = platform.labels.get("org.opencontainers.image.version").map(String::as_str);
    anyhow::ensure!(label == Some(version), "the image has the version {label:?}, not {version}");
    let first = platform.entrypoint.first().map(|path| path.trim_start_matches('/'));
    anyhow::ensure!(
        first.is_some_and(|path| platform.files.contains_key(path)),
        "the image has no file for its entrypoint {first:?}"
    );
    for (name, content) in &platform.files {
        let info = ProgramInfo::read(content).with_context(|| format!("read the program {name}"))?;
        anyhow::ensure!(info.machine == target.machine, "{name} is for {:?}", info.machine);
        anyhow::ensure!(info.is_static, "{name} needs a dynamic linker, and the image has none");
        let root = info.root().with_context(|| format!("{name} does not list its own crate"))?;
        anyhow::ensure!(root.version == version, "{name} lists version {} of {}", root.version, root.name);
        let lists_library = info.packages.iter().any(|package| package.name == "loopfs");
        anyhow::ensure!(lists_library, "{name} does not list the library loopfs: {:?}", info.packages);
    }
    Ok(())
}

/// Starts each program, which prints its version and its help.
async fn start_programs(platform: &PlatformContents, target: &Target, version: &str) -> Result<()> {
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
                option != "--version" || printed.contains(version),
                "{name} --version prints {printed:?}, not {version}"
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
    for name in listed.stdout.split('\0').filter(|name| !name.is_empty()) {
        let (from, target) = (root.join(name), to.join(name));
        // A file that was removed and not committed is still listed.
        if !from.is_file() {
            continue;
        }
        let parent = target.parent().context("a file has a parent")?;
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        fs::copy(&from, &target).with_context(|| format!("copy {}", from.display()))?;
    }
    Ok(())
}

/// Compares two archives. The error names the first program that differs.
fn compare(one: &Path, other: &Path) -> Result<()> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    if read(one)? == read(other)? {
        return Ok(());
    }
    let (first, second) = (index::read(one)?, index::read(other)?);
    for (platform, counterpart) in first.platforms.iter().zip(&second.platforms) {
        for (name, content) in &platform.files {
            let Some(same) = counterpart.files.get(name) else { continue };
            let offset = content.iter().zip(same).position(|(one, other)| one != other);
            anyhow::ensure!(
                content == same,
                "{name} for linux/{} differs from byte {} on; find the path, time or order that it depends on: diffoscope {} {}",
                platform.architecture,
                offset.unwrap_or(content.len().min(same.len())),
                one.display(),
                other.display()
            );
        }
    }
    anyhow::bail!("{} and {} differ, but not in their programs", one.display(), other.display())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use testvm::images::oci::Entry;
    use testvm::images::oci::index::{Index, Platform};

    use super::*;

    fn archive(directory: &Path, name: &str, content: &str) -> PathBuf {
        let program = directory.join(format!("{name}.program"));
        fs::write(&program, content).unwrap();
        let entries = vec![Entry::Program { path: "/driver".into(), host: program }];
        let index = Index {
            tag: "1".into(),
            reference: "example/driver:1".into(),
            entrypoint: vec!["/driver".into()],
            labels: BTreeMap::new(),
            platforms: vec![Platform { architecture: "amd64".into(), entries }],
        };
        let path = directory.join(name);
        index.write(&path).unwrap();
        path
    }

    /// The error has the program and the offset of the first different byte.
    #[test]
    fn different_archives_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let one = archive(directory.path(), "one", "content");
        compare(&one, &archive(directory.path(), "same", "content")).unwrap();
        let error = compare(&one, &archive(directory.path(), "other", "conTent")).unwrap_err().to_string();
        assert!(error.starts_with("driver for linux/amd64 differs from byte 3 on"), "{error}");
    }

    #[tokio::test]
    async fn copy_excludes_only_ignored_files() {
        let directory = tempfile::tempdir().unwrap();
        let (root, copy) = (directory.path().join("checkout"), directory.path().join("copy"));
        fs::create_dir_all(root.join("src")).unwrap();
        fs::write(root.join(".gitignore"), "/target\n").unwrap();
        fs::write(root.join("src/lib.rs"), "//! A library.\n").unwrap();
        fs::write(root.join("target"), "").unwrap();
        git(&root).args(["init", "--quiet"]).run().await.unwrap();
        copy_sources(&root, &copy).await.unwrap();
        assert_eq!(fs::read_to_string(copy.join("src/lib.rs")).unwrap(), "//! A library.\n");
        assert!(copy.join(".gitignore").exists() && !copy.join("target").exists());
    }
}
