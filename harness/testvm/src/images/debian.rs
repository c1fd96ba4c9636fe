//! Fetches Debian packages from the mirror and through the proxy that this machine's apt is configured with.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::{Program, find};
use crate::progress::Step;

/// Debian's own keys, which verify packages of suites other than the host's.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The labels of Debian's archives, as apt shows them.
const MAIN_ARCHIVE: &str = "Debian";
const SECURITY_ARCHIVE: &str = "Debian-Security";

/// The end of the names of suites that come from the security archive.
const SECURITY: &str = "-security";

/// The variant of mmdebstrap that unpacks packages.
pub(super) const EXTRACT: &str = "extract";
/// The variant that installs them in addition to the essential ones.
pub(super) const MINBASE: &str = "minbase";

/// Packages of a suite, which bring their dependencies with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    pub(super) suite: &'a str,
    pub(super) variant: &'static str,
    pub(super) packages: &'a [String],
    /// More arguments for mmdebstrap that decide which packages it fetches.
    pub(super) options: &'a [&'a str],
}

impl<'a> Selection<'a> {
    pub(super) fn new(suite: &'a str, variant: &'static str, packages: &'a [String]) -> Selection<'a> {
        Selection { suite, variant, packages, options: &[] }
    }

    /// Returns everything that decides which packages are fetched, with labels.
    pub(super) fn inputs(&self) -> [(&'static str, String); 4] {
        [
            ("suite", self.suite.to_owned()),
            ("variant", self.variant.to_owned()),
            ("packages", self.packages.join(",")),
            ("options", self.options.join(" ")),
        ]
    }
}

/// A run of `mmdebstrap` for a selection of packages. [`Bootstrap::run`] adds the target.
pub(super) struct Bootstrap {
    program: Program,
    suite: String,
    sources: Vec<String>,
}

impl Bootstrap {
    pub(super) async fn new(selection: &Selection<'_>) -> Result<Bootstrap> {
        let suite = selection.suite;
        let mode = if nix::unistd::geteuid().is_root() { "root" } else { "unshare" };
        let mut program = mmdebstrap()
            .await
            .arg(format!("--variant={}", selection.variant))
            .arg(format!("--mode={mode}"))
            .arg(format!("--include={}", selection.packages.join(",")))
            .args(selection.options.iter().copied());
        for option in apt_options().await? {
            program = program.arg(format!("--aptopt={option}"));
        }
        if base_suite(suite).is_some() {
            // Apt does not install packages from such a suite by default.
            program = program.arg(format!("--aptopt=APT::Default-Release \"{suite}\";"));
        }
        Ok(Bootstrap { program, suite: suite.to_owned(), sources: sources(suite).await? })
    }

    pub(super) fn args(mut self, args: impl IntoIterator<Item = String>) -> Bootstrap {
        self.program = self.program.args(args);
        self
    }

    /// Writes the file system to a tar file.
    pub(super) async fn run(self, target: &Path, step: &Step) -> Result<()> {
        self.program
            .arg(&self.suite)
            .arg(target)
            .args(self.sources)
            .on_stderr_line(step.line_notes())
            .run()
            .await
            .with_context(|| format!("fetch Debian {}", self.suite))?;
        Ok(())
    }

    /// Returns what apt prints about the packages that [`Bootstrap::run`] would fetch. It downloads only the index.
    pub(super) async fn simulate(self) -> Result<String> {
        let simulated = self.program.args(["--simulate", "--verbose"]).arg(&self.suite).arg("/dev/null");
        let finished = simulated.args(self.sources).run().await;
        Ok(finished.with_context(|| format!("look up packages of Debian {}", self.suite))?.stderr)
    }
}

/// Returns mmdebstrap. As root, it mounts file systems in the tree that it builds. They are in a mount namespace of its own,
/// if this machine permits that, so that none stays after it was killed.
async fn mmdebstrap() -> Program {
    const PROGRAM: &str = "mmdebstrap";
    let unshare = || Program::new("unshare").args(["--mount", "--"]);
    let root = nix::unistd::geteuid().is_root();
    let has_namespace = root && unshare().arg("true").run().await.is_ok();
    let program = if has_namespace { unshare().arg(PROGRAM).named(PROGRAM) } else { Program::new(PROGRAM) };
    program.downloads()
}

/// Unpacks packages and all their dependencies. Keeps those files in `directory` for which `place` returns a
/// path there; `place` gets their path from the root. It installs nothing and runs none of the programs.
pub(super) async fn extract(
    selection: &Selection<'_>,
    directory: &Path,
    place: impl Fn(&Path) -> Option<PathBuf>,
    step: &Step,
) -> Result<()> {
    let tar = directory.join("packages.tar");
    Bootstrap::new(selection).await?.run(&tar, step).await?;
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

/// Returns lines for sources.list, or none if apt here has no Debian mirror: mmdebstrap then uses its
/// default.
async fn sources(suite: &str) -> Result<Vec<String>> {
    let Some(main) = mirror(MAIN_ARCHIVE).await? else { return Ok(Vec::new()) };
    let signed = if Path::new(KEYRING).exists() { format!("[signed-by={KEYRING}] ") } else { String::new() };
    let line = |mirror: &str, suite: &str| format!("deb {signed}{mirror} {suite} main");
    let mut lines: Vec<String> = base_suite(suite).map(|base| line(&main, base)).into_iter().collect();
    if suite.ends_with(SECURITY) {
        let security = mirror(SECURITY_ARCHIVE).await?;
        let security = security.with_context(|| {
            format!("apt here has no mirror of Debian's security updates, which {suite} comes from; add one")
        })?;
        lines.push(line(&security, suite));
    } else {
        lines.push(line(&main, suite));
    }
    Ok(lines)
}

/// Returns the release that a suite extends, or `None`. Such a suite has only the packages that differ.
fn base_suite(suite: &str) -> Option<&str> {
    suite.strip_suffix("-backports").or_else(|| suite.strip_suffix(SECURITY))
}

/// Returns the mirror of an archive of Debian that apt is configured with.
async fn mirror(archive: &str) -> Result<Option<String>> {
    if find("apt-get".as_ref()).is_none() {
        return Ok(None);
    }
    let listing = Program::new("apt-get")
        .args(["indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages"])
        .run()
        .await?
        .stdout;
    Ok(debian_mirror(&listing, archive))
}

fn debian_mirror(listing: &str, archive: &str) -> Option<String> {
    listing.lines().find_map(|line| {
        let mut fields = line.split('|');
        let matches = fields.next() == Some("Debian") && fields.next() == Some(archive);
        let uri = fields.next().filter(|uri| !uri.is_empty())?;
        matches.then(|| uri.to_owned())
    })
}

/// Returns apt's options for access to its mirrors.
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
    // apt-config prints scopes without a value as "name \"\";".
    transport && !line.ends_with("\"\";")
}

/// Returns a program that runs as root and sees files of several owners. For an ordinary user, it runs in a
/// user namespace with the user's subordinate ids.
pub(super) fn as_root(program: &str) -> Program {
    if nix::unistd::geteuid().is_root() {
        return Program::new(program);
    }
    // Uses the full path, because the PATH of an ordinary user may not have the directory.
    let path = find(program.as_ref()).unwrap_or_else(|| program.into());
    Program::new("unshare").args(["--user", "--map-root-user", "--map-auto", "--"]).arg(path).named(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirror_of_each_archive_is_found() {
        let listing = "\
Vendor|Vendor Tools|http://vendor.invalid/apt/
Debian|Debian-Security|http://mirror.invalid/debian-security/
||http://unread.invalid/
Debian|Debian|http://mirror.invalid/debian/
Debian|Debian|http://mirror.invalid/debian/";
        let mirror = |archive: &str| debian_mirror(listing, archive);
        assert_eq!(mirror(MAIN_ARCHIVE).as_deref(), Some("http://mirror.invalid/debian/"));
        assert_eq!(mirror(SECURITY_ARCHIVE).as_deref(), Some("http://mirror.invalid/debian-security/"));
        assert_eq!(debian_mirror("||\n", MAIN_ARCHIVE), None);
    }

    #[test]
    fn only_nonempty_transport_options_count() {
        assert!(is_transport("Acquire::http::Proxy \"http://proxy.invalid:3128\";"));
        assert!(!is_transport("Acquire::http \"\";"));
        assert!(!is_transport("Acquire::http::Proxy \"\";"));
        assert!(!is_transport("APT::Install-Recommends \"0\";"));
    }
}
