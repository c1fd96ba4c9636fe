//! A Rust compiler that has the standard library of every requested target: the installed one, or Debian's.
//!
//! `rustup target add` installs the standard libraries of the installed compiler. A machine that reaches only Debian's
//! mirrors can still build for another architecture: Debian has a recent compiler for its browsers, and the package of its
//! standard library exists for each architecture.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::debian::{EXTRACT, Selection};
use super::debian_versions::{unchecked, unpacked};
use crate::cache::{Recipe, replace_file};
use crate::packages;
use crate::rust_build::{self, Toolchain};
use crate::session::Session;

/// The suite whose compiler is recent and runs with the oldest C library.
const SUITE: &str = "bookworm-security";
/// The compiler, and the standard library for the other architecture.
const PACKAGES: [&str; 2] = ["rustc-web", "libstd-rust-web-dev:arm64"];
const ARCHITECTURES: &str = "--architectures=amd64,arm64";
/// The directories of libraries in the packages.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
/// The standard libraries of all targets, in the packages and below the root of the toolchain.
const STANDARD_LIBRARIES: (&str, &str) = ("usr/lib/rustlib", "lib/rustlib");
/// The beginnings of the names of the libraries that the compiler loads. The C library is that of this machine, because its
/// parts must fit the dynamic linker.
const LOADED: [&str; 15] = [
    "librustc_driver-",
    "libLLVM.so.",
    "libstdc++.so.",
    "libffi.so.",
    "libedit.so.",
    "libz3.so.",
    "libz.so.",
    "libzstd.so.",
    "libxml2.so.",
    "libtinfo.so.",
    "libbsd.so.",
    "libmd.so.",
    "libicuuc.so.",
    "libicudata.so.",
    "liblzma.so.",
];
const DYNAMIC_LINKER: &str = "/lib64/ld-linux-x86-64.so.2";
/// The script that runs the compiler, in its directory.
const RUSTC: &str = "rustc";

/// Returns the installed compiler, if it has the standard library of every target, and otherwise Debian's.
///
/// # Errors
/// rustc does not know a target, or Debian's compiler cannot be fetched or does not run here.
pub async fn prepare(session: &Session, targets: &[&str]) -> Result<Toolchain> {
    let root = session.workspace.root();
    let mut missing = Vec::new();
    for target in targets {
        if !rust_build::has_target(session, target).await? {
            missing.push(*target);
        }
    }
    if missing.is_empty() {
        return Toolchain::of(root, None).await;
    }
    let missing = missing.join(" ");
    anyhow::ensure!(
        std::env::consts::ARCH == "x86_64",
        "rustc has no standard library for {missing}; run `rustup target add {missing}`"
    );
    packages::ensure(session, packages::FETCH).await?;
    let packages = PACKAGES.map(str::to_owned);
    let selection = Selection { options: &[ARCHITECTURES], ..Selection::new(SUITE, EXTRACT, &packages) };
    let recipe = Recipe::new("rust-toolchain", 2);
    let directory = unpacked(session, "Debian's Rust compiler", &selection, recipe, place, unchecked)
        .await
        .with_context(|| {
            format!(
                "rustc has no standard library for {missing} (`rustup target add {missing}` installs it), and Debian's \
                 compiler is not available"
            )
        })?;
    let rustc = write_script(&directory)?;
    let toolchain = Toolchain::of(root, Some(rustc)).await?;
    for target in targets {
        let library = directory.join(STANDARD_LIBRARIES.1).join(target);
        anyhow::ensure!(library.is_dir(), "Debian's compiler has no standard library for {target}");
    }
    Ok(toolchain)
}

/// Returns the place of a file of the packages below the root of the toolchain.
fn place(path: &Path) -> Option<PathBuf> {
    if path == Path::new("usr/bin/rustc") {
        return Some(PathBuf::from("bin/rustc"));
    }
    if let Ok(rest) = path.strip_prefix(STANDARD_LIBRARIES.0) {
        // Unpacking creates directories.
        return rest.extension().map(|_| Path::new(STANDARD_LIBRARIES.1).join(rest));
    }
    let name = path.file_name()?.to_str()?;
    let is_library = LIBRARIES.iter().any(|directory| path.parent() == Some(Path::new(directory)));
    (is_library && LOADED.iter().any(|loaded| name.starts_with(loaded))).then(|| Path::new("lib").join(name))
}

/// Writes the script that runs the compiler with its own libraries. `LD_LIBRARY_PATH` would have the linker of this machine
/// load them, too.
fn write_script(directory: &Path) -> Result<PathBuf> {
    let path = directory.join(RUSTC);
    let root = directory.display();
    let script = format!(
        "#!/bin/sh\nexec {DYNAMIC_LINKER} --library-path '{root}/lib' '{root}/bin/rustc' --sysroot '{root}' \"$@\"\n"
    );
    // Another run may execute the script now, which must not see half of it.
    replace_file(&path, &script, 0o755)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// It has the compiler and the libraries of the compiler.
    #[rstest]
    #[case("usr/bin/rustc", Some("bin/rustc"))]
    #[case("usr/bin/rustdoc", None)]
    #[case("usr/lib/x86_64-linux-gnu/libLLVM.so.22.1", Some("lib/libLLVM.so.22.1"))]
    #[case("lib/x86_64-linux-gnu/libtinfo.so.6", Some("lib/libtinfo.so.6"))]
    #[case("usr/lib/aarch64-linux-gnu/libLLVM.so.22.1", None)]
    #[case("lib/x86_64-linux-gnu/libc.so.6", None)]
    #[case("usr/lib/rustlib/aarch64-unknown-linux-gnu/lib", None)]
    #[case("usr/lib/rustlib/a/lib/libstd-1.rlib", Some("lib/rustlib/a/lib/libstd-1.rlib"))]
    fn toolchain_excludes_the_c_library(#[case] path: &str, #[case] expected: Option<&str>) {
        assert_eq!(place(Path::new(path)), expected.map(PathBuf::from));
    }
}
