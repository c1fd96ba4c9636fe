//! Names of volumes.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};

/// Longest id, so that the trash can add a suffix within the 255 bytes of a file name.
const LONGEST: usize = 128;

/// The name of a volume: 1 to 128 of `A-Z a-z 0-9 . _ -`, not starting with a dot. It is the name
/// of a directory entry, so anything that could lead elsewhere is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

impl VolumeId {
    /// Checks a name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`], with what is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = if text.is_empty() || text.len() > LONGEST {
            Some(format!("{} bytes long, 1 to {LONGEST} allowed", text.len()))
        } else if text.starts_with('.') {
            Some("it starts with a dot".to_owned())
        } else {
            text.chars()
                .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')))
                .map(|c| format!("{c:?} is not one of A-Z a-z 0-9 . _ -"))
        };
        match wrong {
            None => Ok(Self(text.to_owned())),
            Some(wrong) => {
                let shown: String = text.chars().take(64).collect();
                Err(Error::new(ErrorKind::InvalidInput, "read volume id", format!("{shown:?}"), wrong))
            }
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for VolumeId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
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
    fn names_that_could_lead_elsewhere_are_refused(#[case] id: &str) {
        assert_eq!(VolumeId::parse(id).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    proptest! {
        #[test]
        fn an_id_is_always_one_path_component(text in "\\PC{0,200}") {
            if let Ok(id) = VolumeId::parse(&text) {
                let components: Vec<_> = std::path::Path::new(id.as_str()).components().collect();
                prop_assert_eq!(components, [std::path::Component::Normal(id.as_str().as_ref())]);
            }
        }
    }
}
