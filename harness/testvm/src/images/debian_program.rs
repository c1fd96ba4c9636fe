//! Programs from the distribution's packages, with the libraries that they load. The kernel tests run them beside ours,
//! and images of test pods have them.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::debian;
use crate::cache::Recipe;
use crate::session::Session;

const SUITE: &str = "trixie";
/// The directory of the libraries, in the packages and in the guest.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The dynamic linker, which programs expect at another path than the packages have it.
const LINKER: &str = "ld-linux-x86-64.so.2";
const LINKER_IN_GUEST: &str = "/lib64/ld-linux-x86-64.so.2";

/// A program of a package of the distribution.
#[derive(Debug)]
pub struct DebianProgram {
    package: &'static str,
    path: &'static str,
    /// The names of the libraries that it loads, apart from the C library.
    libraries: &'static [&'static str],
}

/// losetup of util-linux. The kernel tests compare `loopfs losetup` with it.
pub const LOSETUP: DebianProgram =
    DebianProgram { package: "mount", path: "/usr/sbin/losetup", libraries: &["libsmartcols.so.1"] };
/// mkfs.xfs of xfsprogs. The kernel tests format disks with it.
pub const MKFS_XFS: DebianProgram = DebianProgram {
    package: "xfsprogs",
    path: "/usr/sbin/mkfs.xfs",
    libraries: &["libblkid.so.1", "libuuid.so.1", "libinih.so.1", "liburcu.so.8"],
};
/// The shell of Debian, which runs no commands of its own in place of programs.
pub const DASH: DebianProgram = DebianProgram { package: "dash", path: "/usr/bin/dash", libraries: &[] };
/// dd of GNU, which has flags that busybox lacks.
pub const DD: DebianProgram = DebianProgram { package: "coreutils", path: "/usr/bin/dd", libraries: &[] };

impl DebianProgram {
    /// Returns the path of the program in the guest.
    pub const fn path(&self) -> &'static str {
        self.path
    }

    /// Returns the files that the program needs, from the cache or downloaded: the path in the guest and the path
    /// here.
    ///
    /// # Errors
    /// The package cannot be fetched.
    pub async fn files(&self, session: &Session) -> Result<Vec<(String, PathBuf)>> {
        let recipe = Recipe::new("debian-program", 1)
            .with("suite", SUITE)
            .with("package", self.package)
            .with("program", self.path);
        let directory = session
            .cache
            .artifact(&recipe, async |directory: &Path| {
                let step =
                    session.progress.step(format!("fetch {} of package {}", self.name(), self.package));
                debian::extract(SUITE, self.package, directory, |path| self.place(path), step.notes())
                    .await?;
                step.done("");
                Ok(())
            })
            .await?;
        let library = |name: &str| (format!("/{LIBRARIES}/{name}"), directory.join(LIBRARIES).join(name));
        let program = (self.path.to_owned(), directory.join(self.name_in_package()));
        let linker = (LINKER_IN_GUEST.to_owned(), directory.join(LIBRARIES).join(LINKER));
        let libraries = self.libraries.iter().chain(&["libc.so.6"]).map(|name| library(name));
        Ok([program, linker].into_iter().chain(libraries).collect())
    }

    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    fn name_in_package(&self) -> &str {
        self.path.trim_start_matches('/')
    }

    /// Returns the paths of the program and of its libraries. The name of a library is a link to its file, so both
    /// are taken.
    fn place(&self, path: &Path) -> Option<PathBuf> {
        let is_library = |name: &str| {
            let stem = |library: &str| library.split_once(".so").map(|(stem, _)| format!("{stem}.so"));
            let mut libraries = self.libraries.iter().chain(&["libc.so.6", LINKER]);
            libraries.any(|library| stem(library).is_some_and(|stem| name.starts_with(&stem)))
        };
        let library = path.parent() == Some(Path::new(LIBRARIES))
            && path.file_name().and_then(|name| name.to_str()).is_some_and(is_library);
        (library || path == Path::new(self.name_in_package())).then(|| path.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("usr/sbin/losetup", true)]
    #[case("usr/sbin/swapon", false)]
    #[case("sbin/losetup", false)]
    #[case("usr/lib/x86_64-linux-gnu/libsmartcols.so.1.1.0", true)]
    #[case("usr/lib/x86_64-linux-gnu/libmount.so.1", false)]
    #[case("usr/lib/x86_64-linux-gnu/libc.so.6", true)]
    #[case("usr/lib/x86_64-linux-gnu/gconv/libc.so.6", false)]
    #[case("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", true)]
    fn only_the_program_and_the_libraries_that_it_loads_are_taken(#[case] path: &str, #[case] taken: bool) {
        assert_eq!(LOSETUP.place(Path::new(path)).is_some(), taken);
    }
}
