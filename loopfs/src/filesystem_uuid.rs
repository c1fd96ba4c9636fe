//! The UUID of a file system, in the form that blkid(8) prints.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};

/// UUID of an XFS file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FilesystemUuid(pub [u8; 16]);

impl fmt::Display for FilesystemUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            if matches!(position, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::str::FromStr for FilesystemUuid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed =
            u128::from_str_radix(&text.replace('-', ""), 16).ok().map(|uuid| Self(uuid.to_be_bytes()));
        parsed.filter(|uuid| uuid.to_string() == text.to_ascii_lowercase()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "read file system UUID", format!("{text:?}"), "not a UUID")
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_uuid_reads_back_as_printed(bytes in any::<[u8; 16]>()) {
            let uuid = FilesystemUuid(bytes);
            prop_assert_eq!(uuid.to_string().parse::<FilesystemUuid>().unwrap(), uuid);
        }

        #[test]
        fn any_text_is_parsed_or_rejected(text in "\\PC{0,40}") {
            if let Ok(uuid) = text.parse::<FilesystemUuid>() {
                prop_assert_eq!(uuid.to_string(), text.to_ascii_lowercase());
            }
        }
    }
}
