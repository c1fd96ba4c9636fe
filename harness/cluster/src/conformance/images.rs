//! The container images of the pods of the storage tests: programs of the Go module and of Debian, under the names of the
//! originals.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testvm::cache::Recipe;
use testvm::images::debian_program::{self, DASH, DD};
use testvm::images::oci::{Entry, Image};
use testvm::images::shell;
use testvm::process::Program;
use testvm::session::Session;

/// The registry of the images that are built for the tests, and that of the pause image.
const TEST_IMAGES: &str = "registry.k8s.io/e2e-test-images/";
const COMPONENTS: &str = "registry.k8s.io/";

/// The path of busybox in the images, which runs as the command whose name it has.
const BUSYBOX: &str = "/usr/bin/busybox";
/// The directory of the links to it, and the shell.
const BIN: &str = "/bin";
const SHELL: &str = "/bin/sh";
/// The commands that are not links to busybox in an image with programs of Debian. A shell of busybox would run its own dd.
const OF_DEBIAN: [&str; 3] = ["sh", "ash", "dd"];

/// The programs that are not of a package.
#[derive(Clone, Copy, Debug)]
pub(super) struct Programs<'a> {
    pub(super) agnhost: &'a Path,
    pub(super) pause: &'a Path,
}

/// Builds the images of the pods of the storage tests or takes them from the cache, and returns their archives. `listed` has
/// the references of all images of the tests, one in each line.
pub(super) async fn archives(
    session: &Session,
    listed: &str,
    programs: &Programs<'_>,
) -> Result<Vec<PathBuf>> {
    let busybox = shell::busybox(session).await?;
    let debian = debian_program::files(session, &[&DASH, &DD]).await?;
    let commands =
        Program::new(&busybox).arg("--list").run().await.context("list the commands of busybox")?;
    let commands: Vec<&str> = commands.stdout.lines().collect();
    let shell = || image(SHELL, busybox_entries(&busybox, &commands, &[]));
    let pause = Entry::Program { path: "/pause".into(), host: programs.pause.to_owned() };
    let mut images = [
        ("agnhost.tar", agnhost(programs.agnhost, &busybox, &commands), TEST_IMAGES, "agnhost"),
        ("busybox.tar", shell(), TEST_IMAGES, "busybox"),
        ("nginx.tar", shell(), TEST_IMAGES, "nginx"),
        ("glibc.tar", glibc(&debian, &busybox, &commands), TEST_IMAGES, "glibc-dns-testing"),
        ("pause-3.tar", image("/pause", vec![pause]), COMPONENTS, "pause"),
    ];
    let mut recipe = Recipe::new("conformance-images", 1);
    for (archive, image, registry, name) in &mut images {
        // The list has another order each time.
        image.references = references(listed, registry, name)?;
        recipe = described(recipe.with("archive", *archive), image)?;
    }
    let directory = session
        .cache
        .artifact(&recipe, async |directory: &Path| {
            images.iter().try_for_each(|(archive, image, ..)| image.write(&directory.join(archive)))
        })
        .await?;
    Ok(images.iter().map(|(archive, ..)| directory.join(archive)).collect())
}

/// Returns the references of the image `name` of `registry`: the tests use several versions of some images.
fn references(listed: &str, registry: &str, name: &str) -> Result<Vec<String>> {
    let prefix = format!("{registry}{name}:");
    let found: BTreeSet<&str> =
        listed.lines().map(str::trim).filter(|line| line.starts_with(&prefix)).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "the tests of this release of Kubernetes use no image {registry}{name}"
    );
    Ok(found.into_iter().map(str::to_owned).collect())
}

/// Adds everything that an image has to a recipe.
fn described(mut recipe: Recipe, image: &Image) -> Result<Recipe> {
    let Image { references, entrypoint, command, entries } = image;
    recipe = recipe.with("run", format!("{references:?} {entrypoint:?} {command:?}"));
    for entry in entries {
        recipe = match entry {
            Entry::Program { path, host } => recipe.with_file(path, host)?,
            Entry::Link { path, target } => recipe.with(path, target),
            Entry::Directory { path, mode } => recipe.with(path, mode.to_string()),
        };
    }
    Ok(recipe)
}

/// agnhost runs a command by its first argument. Tests run commands of the shell in the same image.
fn agnhost(agnhost: &Path, busybox: &Path, commands: &[&str]) -> Image {
    let program = Entry::Program { path: "/agnhost".into(), host: agnhost.to_owned() };
    let entries = [program].into_iter().chain(busybox_entries(busybox, commands, &[])).collect();
    Image { command: vec!["pause".into()], ..image("/agnhost", entries) }
}

/// The image for tests that need programs of GNU. Its other commands are those of busybox.
fn glibc(debian: &BTreeMap<String, PathBuf>, busybox: &Path, commands: &[&str]) -> Image {
    let mut entries = busybox_entries(busybox, commands, &OF_DEBIAN);
    entries
        .extend(debian.iter().map(|(path, host)| Entry::Program { path: path.clone(), host: host.clone() }));
    entries.push(Entry::Link { path: SHELL.into(), target: DASH.path().into() });
    image(SHELL, entries)
}

fn image(entrypoint: &str, entries: Vec<Entry>) -> Image {
    Image { references: Vec::new(), entrypoint: vec![entrypoint.into()], command: Vec::new(), entries }
}

/// Returns busybox and a link for each of its commands except those of `without`.
fn busybox_entries(busybox: &Path, commands: &[&str], without: &[&str]) -> Vec<Entry> {
    let links = commands.iter().filter(|command| !without.contains(command) && **command != "busybox");
    let links = links.map(|command| Entry::Link { path: format!("{BIN}/{command}"), target: BUSYBOX.into() });
    [
        // Test pods write there, also as users other than root.
        Entry::Directory { path: "/tmp".into(), mode: 0o1777 },
        Entry::Program { path: BUSYBOX.into(), host: busybox.to_owned() },
    ]
    .into_iter()
    .chain(links)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "registry.k8s.io/e2e-test-images/nginx:1.27-0
registry.k8s.io/e2e-test-images/nginx:1.15-4
registry.k8s.io/e2e-test-images/nginx-ingress:1
registry.k8s.io/pause:3.10.2
gcr.io/k8s-authenticated-test/agnhost:2.6
";

    /// An image that the list lacks is an error.
    #[test]
    fn image_has_all_tags_of_tests() {
        assert_eq!(
            references(LISTED, TEST_IMAGES, "nginx").unwrap(),
            ["registry.k8s.io/e2e-test-images/nginx:1.15-4", "registry.k8s.io/e2e-test-images/nginx:1.27-0"]
        );
        assert_eq!(references(LISTED, COMPONENTS, "pause").unwrap(), ["registry.k8s.io/pause:3.10.2"]);
        let error = references(LISTED, TEST_IMAGES, "agnhost").unwrap_err().to_string();
        assert!(error.contains("no image registry.k8s.io/e2e-test-images/agnhost"), "{error}");
    }
}
