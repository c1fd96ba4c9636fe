//! The version of the running kernel (uname(2)).

use std::sync::LazyLock;

use nix::sys::utsname::uname;

static VERSION: LazyLock<Option<(u32, u32)>> =
    LazyLock::new(|| uname().ok().and_then(|system| version(&system.release().to_string_lossy())));

/// Returns `true` if the kernel has at least this version. Distributions change older kernels, so a kernel of a lower version may
/// nevertheless behave like this one.
pub(crate) fn is_at_least(major: u32, minor: u32) -> bool {
    VERSION.is_some_and(|version| version >= (major, minor))
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_release_names() {
        for (release, expected) in [
            ("6.15.0", Some((6, 15))),
            ("6.18.44-fc-v595", Some((6, 18))),
            ("6.12.107+deb13-amd64", Some((6, 12))),
            ("5.14.0", Some((5, 14))),
            ("x", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
        assert!(version("7.2.12+deb") >= Some((6, 15)));
    }
}
