//! Programs from the distribution's packages, with the libraries that they load, for guests and images without a
//! distribution.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::debian::{self, Selection, Variant};
use super::debian_versions;
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
    /// The paths of the program in the guest, if they are not `path`.
    links: &'static [&'static str],
    /// The names of the libraries that it loads, apart from the C library.
    libraries: &'static [&'static str],
    /// The directory below that of the libraries whose shared objects it loads when it needs them.
    extensions: Option<&'static str>,
}

/// losetup of util-linux. The kernel tests compare `loopfs losetup` with it.
pub const LOSETUP: DebianProgram = DebianProgram {
    package: "mount",
    path: "/usr/sbin/losetup",
    links: &[],
    libraries: &["libsmartcols.so.1"],
    extensions: None,
};
/// mkfs.xfs of xfsprogs. The kernel tests format disks with it.
pub const MKFS_XFS: DebianProgram = DebianProgram {
    package: "xfsprogs",
    path: "/usr/sbin/mkfs.xfs",
    links: &[],
    libraries: &["libblkid.so.1", "libuuid.so.1", "libinih.so.1", "liburcu.so.8"],
    extensions: None,
};
/// mke2fs of e2fsprogs. The kernel tests format devices with it.
pub const MKFS_EXT4: DebianProgram = DebianProgram {
    package: "e2fsprogs",
    path: "/usr/sbin/mke2fs",
    links: &[],
    libraries: &["libext2fs.so.2", "libcom_err.so.2", "libblkid.so.1", "libuuid.so.1", "libe2p.so.2"],
    extensions: None,
};
/// iptables with all its extensions, for IPv4 and IPv6. kube-proxy runs it.
pub const IPTABLES: DebianProgram = DebianProgram {
    package: "iptables",
    path: "/usr/sbin/xtables-nft-multi",
    links: &[
        "/usr/sbin/iptables",
        "/usr/sbin/iptables-save",
        "/usr/sbin/iptables-restore",
        "/usr/sbin/ip6tables",
        "/usr/sbin/ip6tables-save",
        "/usr/sbin/ip6tables-restore",
    ],
    libraries: &[
        "libxtables.so.12",
        "libmnl.so.0",
        "libnftnl.so.11",
        // Of extensions.
        "libm.so.6",
        "libnetfilter_conntrack.so.3",
        "libnfnetlink.so.0",
    ],
    extensions: Some("xtables"),
};
/// The shell of Debian, which runs no commands of its own in place of programs.
pub const DASH: DebianProgram =
    DebianProgram { package: "dash", path: "/usr/bin/dash", links: &[], libraries: &[], extensions: None };
/// dd of GNU, which has flags that busybox lacks.
pub const DD: DebianProgram =
    DebianProgram { package: "coreutils", path: "/usr/bin/dd", links: &[], libraries: &[], extensions: None };

/// fio, which measures input and output. Most of its libraries belong to storage systems that no benchmark uses; it does not start
/// without them.
pub const FIO: DebianProgram = DebianProgram {
    package: "fio",
    path: "/usr/bin/fio",
    links: &[],
    libraries: &[
        "libacl.so.1",
        "libaio.so.1t64",
        "libblkid.so.1",
        "libboost_iostreams.so.1.83.0",
        "libboost_thread.so.1.83.0",
        "libbz2.so.1.0",
        "libcap.so.2",
        "libcom_err.so.2",
        "libcrypto.so.3",
        "libcryptsetup.so.12",
        "libdaxctl.so.1",
        "libdevmapper.so.1.02.1",
        "libffi.so.8",
        "libfmt.so.10",
        "libgcc_s.so.1",
        "libgfapi.so.0",
        "libgfrpc.so.0",
        "libgfxdr.so.0",
        "libglusterfs.so.0",
        "libgmp.so.10",
        "libgnutls.so.30",
        "libgssapi_krb5.so.2",
        "libhogweed.so.6",
        "libibverbs.so.1",
        "libidn2.so.0",
        "libjson-c.so.5",
        "libk5crypto.so.3",
        "libkeyutils.so.1",
        "libkmod.so.2",
        "libkrb5.so.3",
        "libkrb5support.so.0",
        "liblzma.so.5",
        "libm.so.6",
        "libnbd.so.0",
        "libndctl.so.6",
        "libnettle.so.8",
        "libnfs.so.14",
        "libnl-3.so.200",
        "libnl-route-3.so.200",
        "libnuma.so.1",
        "libp11-kit.so.0",
        "libpcre2-8.so.0",
        "libpmem.so.1",
        "librados.so.2",
        "librbd.so.1",
        "librdmacm.so.1",
        "libresolv.so.2",
        "libselinux.so.1",
        "libssl.so.3",
        "libstdc++.so.6",
        "libtasn1.so.6",
        "libtirpc.so.3",
        "libudev.so.1",
        "libunistring.so.5",
        "libuuid.so.1",
        "libxml2.so.2",
        "libz.so.1",
        "libzstd.so.1",
    ],
    // Where librados searches for one of its own.
    extensions: Some("ceph"),
};

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
        let packages = [self.package.to_owned()];
        let selection =
            Selection { suite: SUITE, variant: Variant::Extract, packages: &packages, options: &[] };
        let what = format!("{} of package {}", self.name(), self.package);
        let build = async |directory: &Path| -> Result<()> {
            let step = session.progress.step(format!("fetch {what}"));
            debian::extract(&selection, directory, |path| self.place(path), step.notes()).await?;
            step.done("");
            Ok(())
        };
        let directory = debian_versions::artifact(session, &what, &selection, self.recipe(), build).await?;
        let library = |name: &str| (format!("/{LIBRARIES}/{name}"), directory.join(LIBRARIES).join(name));
        let links = if self.links.is_empty() { std::slice::from_ref(&self.path) } else { self.links };
        let program = directory.join(self.name_in_package());
        let mut files: Vec<_> = links.iter().map(|link| ((*link).to_owned(), program.clone())).collect();
        files.push((LINKER_IN_GUEST.to_owned(), directory.join(LIBRARIES).join(LINKER)));
        files.extend(self.libraries.iter().chain(&["libc.so.6"]).map(|name| library(name)));
        if let Some(extensions) = self.extensions {
            let names = names(&directory.join(LIBRARIES).join(extensions))?;
            files.extend(names.iter().map(|name| library(&format!("{extensions}/{name}"))));
        }
        Ok(files)
    }

    /// Returns the recipe with everything that decides which files of the packages are kept.
    fn recipe(&self) -> Recipe {
        Recipe::new("debian-program", 2)
            .with("program", self.path)
            .with("libraries", self.libraries.join(","))
            .with("extensions", self.extensions.unwrap_or_default())
    }

    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    fn name_in_package(&self) -> &str {
        self.path.trim_start_matches('/')
    }

    /// Returns the paths of the program, of its libraries and of its extensions. The name of a library is a link to its
    /// file, so both are taken.
    fn place(&self, path: &Path) -> Option<PathBuf> {
        let is_library = |name: &str| {
            let stem = |library: &str| library.split_once(".so").map(|(stem, _)| format!("{stem}.so"));
            let mut libraries = self.libraries.iter().chain(&["libc.so.6", LINKER]);
            libraries.any(|library| stem(library).is_some_and(|stem| name.starts_with(&stem)))
        };
        let library = path.parent() == Some(Path::new(LIBRARIES))
            && path.file_name().and_then(|name| name.to_str()).is_some_and(is_library);
        let extension = self.extensions.is_some_and(|extensions| {
            path.parent() == Some(&Path::new(LIBRARIES).join(extensions))
                && path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so"))
        });
        (library || extension || path == Path::new(self.name_in_package())).then(|| path.to_owned())
    }
}

/// Returns the names in a directory in their order, because the bytes of an image depend on it.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry?.file_name().into_string();
        name.map_err(|name| anyhow::anyhow!("the name of the library {} is not UTF-8", name.display()))
    };
    let mut names = entries.map(name).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The program needs itself and the libraries that it loads.
    #[rstest]
    #[case("usr/sbin/losetup", true)]
    #[case("usr/sbin/swapon", false)]
    #[case("sbin/losetup", false)]
    #[case("usr/lib/x86_64-linux-gnu/libsmartcols.so.1.1.0", true)]
    #[case("usr/lib/x86_64-linux-gnu/libmount.so.1", false)]
    #[case("usr/lib/x86_64-linux-gnu/libc.so.6", true)]
    #[case("usr/lib/x86_64-linux-gnu/gconv/libc.so.6", false)]
    #[case("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", true)]
    fn only_needed_files_are_taken(#[case] path: &str, #[case] taken: bool) {
        assert_eq!(LOSETUP.place(Path::new(path)).is_some(), taken);
    }

    #[rstest]
    #[case("usr/sbin/xtables-nft-multi", true)]
    #[case("usr/sbin/nfnl_osf", false)]
    #[case("usr/lib/x86_64-linux-gnu/libmnl.so.0", true)]
    #[case("usr/lib/x86_64-linux-gnu/libnftnl.so.11.6.0", true)]
    #[case("usr/lib/x86_64-linux-gnu/libresolv.so.2", false)]
    #[case("usr/lib/x86_64-linux-gnu/xtables/libxt_comment.so", true)]
    #[case("usr/lib/x86_64-linux-gnu/gconv/IBM037.so", false)]
    #[case("usr/share/xtables/pf.os", false)]
    fn program_extensions_are_taken_too(#[case] path: &str, #[case] taken: bool) {
        assert_eq!(IPTABLES.place(Path::new(path)).is_some(), taken);
    }

    #[test]
    fn key_depends_on_kept_files() {
        let program = |libraries, extensions| DebianProgram {
            package: "p",
            path: "/usr/bin/p",
            links: &[],
            libraries,
            extensions,
        };
        let key = |libraries, extensions| program(libraries, extensions).recipe().key();
        assert_eq!(key(&["a.so.1"], None), key(&["a.so.1"], None));
        assert_ne!(key(&["a.so.1"], None), key(&["a.so.1", "b.so.1"], None));
        assert_ne!(key(&["a.so.1"], None), key(&["a.so.1"], Some("plugins")));
    }
}
