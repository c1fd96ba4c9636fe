//! Debian packages, from the mirror and through the proxy this machine is configured with.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::{Program, find};
use crate::progress::Notes;

/// Debian's own keys, by which packages of other suites than the host's are checked.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// `mmdebstrap` for `suite`, before its package list and its target.
pub(super) struct Bootstrap {
    program: Program,
    suite: String,
    sources: Vec<String>,
}

impl Bootstrap {
    pub(super) async fn new(suite: &str, variant: &str, packages: &[String]) -> Result<Bootstrap> {
        let mode = if nix::unistd::geteuid().is_root() { "root" } else { "unshare" };
        let mut program = Program::new("mmdebstrap")
            .arg(format!("--variant={variant}"))
            .arg(format!("--mode={mode}"))
            .arg(format!("--include={}", packages.join(",")));
        for option in apt_options().await? {
            program = program.arg(format!("--aptopt={option}"));
        }
        if base_suite(suite).is_some() {
            // Apt takes nothing from such a suite by itself.
            program = program.arg(format!("--aptopt=APT::Default-Release \"{suite}\";"));
        }
        Ok(Bootstrap { program, suite: suite.to_owned(), sources: sources(suite).await? })
    }

    #[must_use]
    pub(super) fn args(mut self, args: impl IntoIterator<Item = String>) -> Bootstrap {
        self.program = self.program.args(args);
        self
    }

    /// Writes the file system to a tar file.
    pub(super) async fn run(self, target: &Path, note: impl FnMut(&str) + Send + 'static) -> Result<()> {
        self.program
            .arg(&self.suite)
            .arg(target)
            .args(self.sources)
            .on_stderr_line(note)
            .run()
            .await
            .with_context(|| format!("fetch Debian {}", self.suite))?;
        Ok(())
    }
}

/// Unpacks a package and all it depends on, and keeps in `directory` the files that `place` has a place for there, by
/// their path from the root. Nothing is installed and nothing of it runs.
pub(super) async fn extract(
    suite: &str,
    package: &str,
    directory: &Path,
    place: impl Fn(&Path) -> Option<PathBuf>,
    notes: Notes,
) -> Result<()> {
    let tar = directory.join("packages.tar");
    let note = move |line: &str| notes.note(line.to_owned());
    Bootstrap::new(suite, "extract", &[package.to_owned()]).await?.run(&tar, note).await?;
    let file = File::open(&tar).with_context(|| format!("open {}", tar.display()))?;
    let mut archive = tar::Archive::new(BufReader::new(file));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?;
        let Some(place) = place(path.strip_prefix(".").unwrap_or(&path)) else { continue };
        let target = directory.join(place);
        let parent = target.parent().context("a file has a parent")?;
        std::fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        entry.unpack(&target).with_context(|| format!("unpack {}", target.display()))?;
    }
    std::fs::remove_file(&tar).with_context(|| format!("remove {}", tar.display()))
}

/// Lines for sources.list; none, if apt here knows no Debian mirror: mmdebstrap has a default of its own.
async fn sources(suite: &str) -> Result<Vec<String>> {
    let Some(mirror) = mirror().await? else { return Ok(Vec::new()) };
    let base = base_suite(suite);
    let signed = if Path::new(KEYRING).exists() { format!("[signed-by={KEYRING}] ") } else { String::new() };
    Ok(base.into_iter().chain([suite]).map(|suite| format!("deb {signed}{mirror} {suite} main")).collect())
}

/// The release that a suite is an addition to: it holds only what differs from that.
fn base_suite(suite: &str) -> Option<&str> {
    suite.strip_suffix("-backports")
}

/// The mirror of Debian proper that apt is configured with.
async fn mirror() -> Result<Option<String>> {
    if find("apt-get".as_ref()).is_none() {
        return Ok(None);
    }
    let listing = Program::new("apt-get")
        .args(["indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages"])
        .run()
        .await?
        .stdout;
    Ok(debian_mirror(&listing))
}

fn debian_mirror(listing: &str) -> Option<String> {
    listing.lines().find_map(|line| {
        let mut fields = line.split('|');
        let matches = fields.next() == Some("Debian") && fields.next() == Some("Debian");
        let uri = fields.next().filter(|uri| !uri.is_empty())?;
        matches.then(|| uri.to_owned())
    })
}

/// How apt here reaches its mirrors.
async fn apt_options() -> Result<Vec<String>> {
    if find("apt-config".as_ref()).is_none() {
        return Ok(Vec::new());
    }
    let dump = Program::new("apt-config").arg("dump").run().await?.stdout;
    Ok(dump.lines().filter(|line| is_transport(line)).map(str::to_owned).collect())
}

fn is_transport(line: &str) -> bool {
    let name = line.split(' ').next().unwrap_or_default();
    let transport = name.starts_with("Acquire::http::") || name.starts_with("Acquire::https::");
    // Scopes without a value come as "name \"\";".
    transport && !line.ends_with("\"\";")
}

/// A program that sees itself as root over files of several owners: as it is for root, in a user namespace
/// with the user's subordinate ids for anybody else.
pub(super) fn as_root(program: &str) -> Program {
    if nix::unistd::geteuid().is_root() {
        return Program::new(program);
    }
    // Where it is, for the PATH of an ordinary user may lack it.
    let path = find(program.as_ref()).unwrap_or_else(|| program.into());
    Program::new("unshare").args(["--user", "--map-root-user", "--map-auto", "--"]).arg(path).named(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_of_debian_proper_is_taken() {
        let listing = "\
Vendor|Vendor Tools|http://vendor.invalid/apt/
Debian|Debian-Security|http://mirror.invalid/debian-security/
||http://unread.invalid/
Debian|Debian|http://mirror.invalid/debian/
Debian|Debian|http://mirror.invalid/debian/";
        assert_eq!(debian_mirror(listing).as_deref(), Some("http://mirror.invalid/debian/"));
        assert_eq!(debian_mirror("||\n"), None);
    }

    #[test]
    fn only_options_of_the_transport_are_carried_over() {
        assert!(is_transport("Acquire::http::Proxy \"http://proxy.invalid:3128\";"));
        assert!(!is_transport("Acquire::http \"\";"));
        assert!(!is_transport("Acquire::http::Proxy \"\";"));
        assert!(!is_transport("APT::Install-Recommends \"0\";"));
    }
}
