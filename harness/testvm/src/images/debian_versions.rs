//! The versions of Debian's packages. An artifact of packages is cached under the versions of all of them.
//!
//! A machine records the versions when it first fetches a selection of packages, and stays with them while its cache has
//! the artifact. `fetch --update` of the project moves to the newest ones. The project itself pins none, because Debian's
//! mirrors have only the newest version of each suite: another machine could not fetch a pinned one later.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::debian::{self, Bootstrap, Selection};
use crate::cache::{Recipe, replace_file};
use crate::session::Session;

/// The directory of the records, in the cache.
const RECORDS: &str = "debian-versions";

/// The version of each package, by its name.
type Packages = BTreeMap<String, String>;

/// Returns the artifact of `recipe` with the files of the packages for which `place` returns a path there: see
/// [`debian::extract`]. What does not pass `check` does not become an artifact.
pub(super) async fn unpacked(
    session: &Session,
    what: &str,
    selection: &Selection<'_>,
    recipe: Recipe,
    place: impl Fn(&Path) -> Option<PathBuf>,
    check: impl AsyncFnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let build = async |directory: &Path| -> Result<()> {
        let step = session.progress.step(format!("fetch {what}"));
        debian::extract(selection, directory, place, &step).await?;
        check(directory).await?;
        step.done("");
        Ok(())
    };
    artifact(session, what, selection, recipe, build).await
}

/// The check of files that cannot be incomplete.
pub(super) async fn unchecked(_: &Path) -> Result<()> {
    Ok(())
}

/// Returns the artifact of `recipe` and of the packages of `selection`, from the cache or built. `what` names it in the
/// report of versions.
pub(super) async fn artifact<F>(
    session: &Session,
    what: &str,
    selection: &Selection<'_>,
    recipe: Recipe,
    build: F,
) -> Result<PathBuf>
where
    F: AsyncFnOnce(&Path) -> Result<()>,
{
    let recipe = selection.inputs().iter().fold(recipe, |recipe, (label, value)| recipe.with(label, value));
    let with_versions = |packages: &Packages| recipe.clone().with("versions", lines(packages).join("\n"));
    let record = record(session, selection)?;
    let known = read(&record)?;
    if let Some(packages) = known.as_ref().filter(|_| !session.versions.newest())
        && let Some(artifact) = session.cache.get(&with_versions(packages))
    {
        report(session, what, selection, packages);
        return Ok(artifact);
    }
    // The mirror has no other versions.
    let step = session.progress.step(format!("look up the newest versions for {what}"));
    let newest = look_up(selection).await?;
    let changes = known.map_or_else(Vec::new, |known| changes(&known, &newest));
    step.done(if changes.is_empty() { String::new() } else { format!("\n  {}", changes.join("\n  ")) });
    let artifact = session.cache.artifact(&with_versions(&newest), build).await?;
    // After the build: versions that cannot be fetched must not replace those of a complete artifact.
    replace_file(&record, &lines(&newest).join("\n"), 0o600)?;
    report(session, what, selection, &newest);
    Ok(artifact)
}

/// Returns the path of the record of a selection.
fn record(session: &Session, selection: &Selection<'_>) -> Result<PathBuf> {
    let directory = session.cache.root().join(RECORDS);
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let inputs = selection.inputs();
    let key = inputs.iter().fold(Recipe::new(RECORDS, 1), |key, (label, value)| key.with(label, value)).key();
    Ok(directory.join(key))
}

fn read(record: &Path) -> Result<Option<Packages>> {
    match fs::read_to_string(record) {
        Ok(text) => Ok(Some(parse_lines(&text))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", record.display())),
    }
}

/// Returns the newest version of each package that the mirrors have, with all dependencies.
async fn look_up(selection: &Selection<'_>) -> Result<Packages> {
    let packages = parse_simulation(&Bootstrap::new(selection).await?.simulate().await?);
    for name in selection.packages {
        anyhow::ensure!(
            packages.contains_key(name),
            "look up the version of {name} in Debian {}: mmdebstrap's simulation does not install it",
            selection.suite
        );
    }
    Ok(packages)
}

/// Parses apt's lines `Inst NAME (VERSION ORIGIN [ARCHITECTURE])`.
fn parse_simulation(printed: &str) -> Packages {
    let package = |line: &str| {
        let (name, rest) = line.strip_prefix("Inst ")?.split_once(' ')?;
        let (_, version) = rest.split_once('(')?;
        Some((name.to_owned(), version.split(' ').next()?.to_owned()))
    };
    printed.lines().filter_map(package).collect()
}

fn lines(packages: &Packages) -> Vec<String> {
    packages.iter().map(|(name, version)| format!("{name} {version}")).collect()
}

fn parse_lines(text: &str) -> Packages {
    let pair = |line: &str| line.split_once(' ').map(|(name, version)| (name.to_owned(), version.to_owned()));
    text.lines().filter_map(pair).collect()
}

/// Returns a line for each package whose version differs.
fn changes(old: &Packages, new: &Packages) -> Vec<String> {
    let none = || "none".to_owned();
    let names = old.keys().chain(new.keys().filter(|name| !old.contains_key(*name)));
    names
        .filter(|name| old.get(*name) != new.get(*name))
        .map(|name| {
            let version = |packages: &Packages| packages.get(name).cloned().unwrap_or_else(none);
            format!("{name} {} -> {}", version(old), version(new))
        })
        .collect()
}

/// Records all versions, and prints those of the selected packages.
fn report(session: &Session, what: &str, selection: &Selection<'_>, packages: &Packages) {
    let (selected, others): (Vec<_>, Vec<_>) =
        packages.iter().partition(|(name, _)| selection.packages.contains(name));
    let line = |(name, version): &(&String, &String)| format!("{name} {version}");
    let printed = selected.iter().map(line).collect::<Vec<_>>();
    let all = printed.iter().cloned().chain(others.iter().map(line)).collect();
    session.use_version(what, all, &printed.join(", "));
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
I: simulate downloading packages with apt...
Inst gcc-14-base (14.2.0-19 Debian:13.8/stable [amd64])
Conf gcc-14-base (14.2.0-19 Debian:13.8/stable [amd64])
Inst libc6 (2.41-12+deb13u5 Debian:13.8/stable [amd64]) []
Inst libacl1 [2.3.1-1] (1:2.3.2-2+b1 Debian:13.8/stable [amd64])
";

    #[test]
    fn simulated_packages_have_their_versions() {
        let packages = parse_simulation(PRINTED);
        assert_eq!(
            lines(&packages),
            ["gcc-14-base 14.2.0-19", "libacl1 1:2.3.2-2+b1", "libc6 2.41-12+deb13u5"]
        );
        assert_eq!(parse_lines(&lines(&packages).join("\n")), packages);
    }

    #[test]
    fn changes_list_all_version_differences() {
        let old = parse_lines("a 1\nb 1\nc 1");
        let new = parse_lines("a 1\nb 2\nd 1");
        assert_eq!(changes(&old, &new), ["b 1 -> 2", "c 1 -> none", "d none -> 1"]);
        assert!(changes(&old, &old).is_empty());
    }

    #[test]
    fn written_record_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("record");
        assert_eq!(read(&record).unwrap(), None);
        let packages = parse_simulation(PRINTED);
        replace_file(&record, &lines(&packages).join("\n"), 0o600).unwrap();
        assert_eq!(read(&record).unwrap(), Some(packages));
    }
}
