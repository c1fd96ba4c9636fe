//! Programs from the distribution's packages, with the libraries that they load, for guests and images without a
//! distribution.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::debian::{EXTRACT, Selection};
use super::debian_versions::unpacked;
use crate::cache::Recipe;
use crate::process::Program;
use crate::session::Session;

const SUITE: &str = "trixie";
/// The directory of the libraries, in the packages and in the guest.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The dynamic linker in that directory. Programs expect it at another path, which it prints.
const LINKER: &str = "ld-linux-x86-64.so.2";

/// A program of a package of the distribution.
#[derive(Debug)]
pub struct DebianProgram {
    package: &'static str,
    path: &'static str,
    /// The paths of the program in the guest, if they are not `path`.
    links: &'static [&'static str],
    /// The directory below that of the libraries whose shared objects it loads when it needs them.
    extensions: Option<&'static str>,
}

const fn program(package: &'static str, path: &'static str) -> DebianProgram {
    DebianProgram { package, path, links: &[], extensions: None }
}

/// losetup of util-linux. The kernel tests compare `loopfs losetup` with it.
pub const LOSETUP: DebianProgram = program("mount", "/usr/sbin/losetup");
/// mkfs.xfs of xfsprogs. The kernel tests format disks with it.
pub const MKFS_XFS: DebianProgram = program("xfsprogs", "/usr/sbin/mkfs.xfs");
/// mke2fs of e2fsprogs. The kernel tests format devices with it.
pub const MKFS_EXT4: DebianProgram = program("e2fsprogs", "/usr/sbin/mke2fs");
/// iptables with all its extensions, for IPv4 and IPv6. kube-proxy runs it.
pub const IPTABLES: DebianProgram = DebianProgram {
    links: &[
        "/usr/sbin/iptables",
        "/usr/sbin/iptables-save",
        "/usr/sbin/iptables-restore",
        "/usr/sbin/ip6tables",
        "/usr/sbin/ip6tables-save",
        "/usr/sbin/ip6tables-restore",
    ],
    extensions: Some("xtables"),
    ..program("iptables", "/usr/sbin/xtables-nft-multi")
};
/// The shell of Debian, which runs no commands of its own in place of programs.
pub const DASH: DebianProgram = program("dash", "/usr/bin/dash");
/// dd of GNU, which has flags that busybox lacks.
pub const DD: DebianProgram = program("coreutils", "/usr/bin/dd");
/// fio, which measures input and output. librados, which it loads, has a library of its own in this directory.
pub const FIO: DebianProgram = DebianProgram { extensions: Some("ceph"), ..program("fio", "/usr/bin/fio") };

/// Returns the files that these programs need, each once: several can have the same library, and all are of one suite.
///
/// # Errors
/// As [`DebianProgram::files`].
pub async fn files(session: &Session, programs: &[&DebianProgram]) -> Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    for program in programs {
        files.extend(program.files(session).await?);
    }
    Ok(files)
}

impl DebianProgram {
    /// Returns the path of the program in the guest.
    pub const fn path(&self) -> &'static str {
        self.path
    }

    /// Returns the files that the program needs, from the cache or downloaded: the path in the guest and the path
    /// here.
    ///
    /// # Errors
    /// The package cannot be fetched, or the packages lack a library.
    pub async fn files(&self, session: &Session) -> Result<Vec<(String, PathBuf)>> {
        let packages = [self.package.to_owned()];
        let selection = Selection::new(SUITE, EXTRACT, &packages);
        let what = format!("{} of package {}", self.path, self.package);
        let recipe = Recipe::new("debian-program", 3)
            .with("program", self.path)
            .with("extensions", self.extensions.unwrap_or_default());
        let place = |path: &Path| self.needs(path).then(|| path.to_owned());
        let check = async |directory: &Path| self.libraries(directory).await.map(drop);
        let directory = unpacked(session, &what, &selection, recipe, place, check).await?;
        let mut files = self.libraries(&directory).await?;
        let links = if self.links.is_empty() { std::slice::from_ref(&self.path) } else { self.links };
        files.extend(links.iter().map(|link| ((*link).to_owned(), self.in_packages(&directory))));
        Ok(files.into_iter().collect())
    }

    fn in_packages(&self, directory: &Path) -> PathBuf {
        directory.join(self.path.trim_start_matches('/'))
    }

    /// Returns the shared objects that the program loads from unpacked packages. They are in their order, because the bytes of an image
    /// depend on it.
    async fn libraries(&self, directory: &Path) -> Result<BTreeMap<String, PathBuf>> {
        let libraries = directory.join(LIBRARIES);
        let mut search = libraries.clone().into_os_string();
        let mut files = BTreeMap::new();
        let mut names = Vec::new();
        if let Some(extensions) = self.extensions {
            let extensions = libraries.join(extensions);
            search.push(":");
            search.push(&extensions);
            let entries = fs::read_dir(&extensions);
            for entry in entries.with_context(|| format!("read {}", extensions.display()))? {
                let path = entry?.path();
                names.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
                files.insert(in_guest(directory, &path)?, path);
            }
        }
        let linker = Program::new(libraries.join(LINKER)).named("the dynamic linker");
        let linker =
            linker.args(["--inhibit-cache", "--list", "--preload", &names.join(" "), "--library-path"]);
        let printed = linker.arg(search).arg(self.in_packages(directory)).run().await?.stdout;
        files.extend(loaded(directory, &printed).with_context(|| format!("package {}", self.package))?);
        Ok(files)
    }

    /// Returns `true` for the program, its extensions, and all libraries, of which the linker selects later.
    fn needs(&self, path: &Path) -> bool {
        let libraries = Path::new(LIBRARIES);
        path == Path::new(self.path.trim_start_matches('/'))
            || path.parent() == Some(libraries)
            || path.extension().is_some()
                && self.extensions.is_some_and(|name| path.parent() == Some(&libraries.join(name)))
    }
}

/// Returns the files in the output of the linker: `NAME => PATH (ADDRESS)`. The vDSO has no path.
fn loaded(directory: &Path, printed: &str) -> Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    for (name, path) in printed.lines().filter_map(|line| line.trim().split_once(" => ")) {
        let path = Path::new(path.split(" (").next().unwrap_or_default());
        let found = in_guest(directory, path).with_context(|| format!("the packages lack {name}"))?;
        files.insert(if name.starts_with('/') { name.to_owned() } else { found }, path.to_owned());
    }
    Ok(files)
}

/// Returns the path of a file of the unpacked packages in the guest.
fn in_guest(directory: &Path, path: &Path) -> Result<String> {
    let path = path.strip_prefix(directory).with_context(|| format!("{} is of this host", path.display()))?;
    Ok(format!("/{}", path.to_str().context("the name of a library is not UTF-8")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_of_the_packages() {
        let printed = "\tlinux-vdso.so.1 (0x00007ffc)\n\
            \tlibc.so.6 => /d/usr/lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)\n\
            \t/lib64/ld-linux-x86-64.so.2 => /d/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 (0x00007f02)\n";
        let files = loaded(Path::new("/d"), printed).unwrap();
        assert!(
            files.keys().eq(["/lib64/ld-linux-x86-64.so.2", "/usr/lib/x86_64-linux-gnu/libc.so.6"]),
            "{files:?}"
        );
        for missing in ["libz.so.1 => not found", "libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x1)"] {
            let error = loaded(Path::new("/d"), missing).unwrap_err();
            assert!(error.to_string().contains("lack libz.so.1"), "{error}");
        }
    }
}
