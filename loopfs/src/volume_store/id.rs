//! Names of volumes and snapshots.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};

/// Longest id, so that the trash can add a suffix within the 255 bytes of a file name.
const LONGEST: usize = 128;

macro_rules! id {
    ($name:ident, $of:literal, $read:literal) => {
        #[doc = concat!("The name of a ", $of, ": 1 to 128 of `A-Z a-z 0-9 . _ -`, not starting with a dot.")]
        /// It is the name of a directory entry, so anything that could lead elsewhere is refused.
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Checks a name.
            ///
            /// # Errors
            /// [`ErrorKind::InvalidInput`], with what is wrong.
            pub fn parse(text: &str) -> Result<Self> {
                match wrong_in(text) {
                    None => Ok(Self(text.to_owned())),
                    Some(wrong) => {
                        let shown: String = text.chars().take(64).collect();
                        Err(Error::new(ErrorKind::InvalidInput, $read, format!("{shown:?}"), wrong))
                    }
                }
            }

            /// The name.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                Self::parse(text)
            }
        }
    };
}

id!(VolumeId, "volume", "read volume id");
id!(SnapshotId, "snapshot", "read snapshot id");

fn wrong_in(text: &str) -> Option<String> {
    if text.is_empty() || text.len() > LONGEST {
        return Some(format!("{} bytes long, 1 to {LONGEST} allowed", text.len()));
    }
    if text.starts_with('.') {
        return Some("it starts with a dot".to_owned());
    }
    let wrong = text.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')));
    wrong.map(|c| format!("{c:?} is not one of A-Z a-z 0-9 . _ -"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("pvc-6f1b0c3e-0000-4000-8000-000000000000")]
    #[case("A.b_c-9")]
    fn plain_names_are_taken(#[case] id: &str) {
        assert_eq!(VolumeId::parse(id).unwrap().as_str(), id);
        assert_eq!(SnapshotId::parse(id).unwrap().as_str(), id);
    }

    #[rstest]
    #[case("")]
    #[case(".")]
    #[case("..")]
    #[case(".hidden")]
    #[case("a/b")]
    #[case("../../etc/passwd")]
    #[case("a\0b")]
    #[case("a\nb")]
    #[case("ä")]
    fn names_unsafe_in_paths_are_refused(#[case] id: &str) {
        assert_eq!(VolumeId::parse(id).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(SnapshotId::parse(id).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    proptest! {
        #[test]
        fn an_id_is_one_path_component(text in "\\PC{0,200}") {
            if let Ok(id) = VolumeId::parse(&text) {
                let components: Vec<_> = std::path::Path::new(id.as_str()).components().collect();
                prop_assert_eq!(components, [std::path::Component::Normal(id.as_str().as_ref())]);
            }
        }
    }
}
