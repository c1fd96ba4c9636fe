//! Target paths in requests.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use super::field::Result;
use crate::error::InvalidRequest;

/// `PATH_MAX`, less the terminating NUL.
const MAX_PATH_LEN: usize = 4095;

/// `NAME_MAX`.
const MAX_COMPONENT_LEN: usize = 255;

/// A path below the kubelet directory, relative to that directory. Only its text is checked: it contains neither `..`
/// nor anything else that leads outside. [`loopfs::publish`] refuses symbolic links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TargetPath {
    full: PathBuf,
    relative: PathBuf,
}

impl TargetPath {
    pub(super) fn parse(field: &'static str, text: &str, kubelet_dir: &Path) -> Result<Self> {
        let invalid = |problem: String| Err(InvalidRequest::new(field, problem));
        if text.is_empty() {
            return invalid("must not be empty".to_owned());
        }
        if text.len() > MAX_PATH_LEN {
            return invalid(format!("must not be longer than {MAX_PATH_LEN} bytes, but has {}", text.len()));
        }
        if let Some(character) = text.chars().find(|character| character.is_control()) {
            return invalid(format!("must not contain {character:?}"));
        }
        let path = Path::new(text);
        if !path.is_absolute() {
            return invalid("must be an absolute path".to_owned());
        }
        if path.components().any(|component| component == Component::ParentDir) {
            return invalid("must not contain ..".to_owned());
        }
        let relative = match path.strip_prefix(kubelet_dir) {
            Ok(relative) if relative.file_name().is_some() => relative,
            _ => {
                return invalid(format!(
                    "must be below {0} (--kubelet-dir); if {text} is below the --root-dir of the kubelet, give that to the driver \
                     instead of {0}",
                    kubelet_dir.display()
                ));
            }
        };
        if relative.components().any(|component| component.as_os_str().len() > MAX_COMPONENT_LEN) {
            return invalid(format!(
                "must not have a component that is longer than {MAX_COMPONENT_LEN} bytes"
            ));
        }
        // The path is rebuilt from its components, without the `//` and `/./` that components() skips.
        let relative: PathBuf = relative.components().collect();
        Ok(Self { full: kubelet_dir.join(&relative), relative })
    }

    /// Returns the path relative to the kubelet directory.
    pub(crate) fn relative(&self) -> &Path {
        &self.relative
    }
}

impl fmt::Display for TargetPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.full.display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const KUBELET: &str = "/var/lib/kubelet";

    fn parse(text: &str) -> Result<TargetPath> {
        TargetPath::parse("target_path", text, Path::new(KUBELET))
    }

    #[rstest]
    #[case("/var/lib/kubelet/pods/1/mount", "pods/1/mount")]
    #[case("/var/lib/kubelet/target", "target")]
    #[case("/var//lib/kubelet/./pods//1/", "pods/1")]
    #[case("/var/lib/kubelet/a b/ü", "a b/ü")]
    fn paths_below_the_kubelet_directory_are_accepted(#[case] text: &str, #[case] relative: &str) {
        assert_eq!(parse(text).unwrap().relative(), Path::new(relative));
    }

    #[rstest]
    #[case::empty("")]
    #[case::relative("pods/1")]
    #[case::the_directory_itself("/var/lib/kubelet")]
    #[case::the_directory_with_a_slash("/var/lib/kubelet/")]
    #[case::outside("/etc/passwd")]
    #[case::neighbour("/var/lib/kubelet-other/x")]
    #[case::leads_out("/var/lib/kubelet/../x")]
    #[case::leads_out_and_back("/var/lib/kubelet/pods/../pods/x")]
    #[case::nul("/var/lib/kubelet/a\0b")]
    #[case::newline("/var/lib/kubelet/a\nb")]
    #[case::long_name(&format!("{KUBELET}/{}", "n".repeat(256)))]
    #[case::long_path(&format!("{KUBELET}/{}", "n/".repeat(2048)))]
    fn other_paths_are_refused(#[case] text: &str) {
        assert!(parse(text).is_err());
    }

    proptest! {
        #[test]
        fn an_accepted_path_stays_below_the_kubelet_directory(text in "(/var/lib/kubelet)?[a./ \\-\\x00-\\x1f]{0,60}") {
            if let Ok(path) = parse(&text) {
                prop_assert!(path.relative().components().all(|part| matches!(part, Component::Normal(_))));
                prop_assert!(path.relative().file_name().is_some());
            }
        }
    }
}
