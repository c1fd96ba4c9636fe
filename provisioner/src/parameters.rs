//! StorageClass parameters: the one place that knows which exist and what they may say.

use std::{collections::BTreeMap, fmt, num::NonZeroU64};

/// The parameters of a storage class, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Parameters {
    /// Bytes of capacity for each inode a Filesystem volume may hold; the store's own ratio when absent.
    pub(crate) bytes_per_inode: Option<NonZeroU64>,
}

/// Everything that is wrong with a class's parameters, all at once, so that it is mended in one go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParametersError {
    complaints: Vec<String>,
}

/// An inode takes 512 bytes on disk at most by default, so a denser ratio promises what the file system
/// cannot hold.
const BYTES_PER_INODE_MIN: u64 = 512;

/// Beyond this, a volume of ordinary size could hold no files at all.
const BYTES_PER_INODE_MAX: u64 = 1 << 30;

const BYTES_PER_INODE: &str = "bytesPerInode";

impl Parameters {
    /// Reads a storage class's parameters.
    ///
    /// # Errors
    /// Names every unknown parameter and malformed value, and what is allowed instead. An unknown parameter
    /// is an error rather than ignored: a class with a typing mistake would otherwise hand out volumes it
    /// does not describe.
    pub(crate) fn parse(parameters: Option<&BTreeMap<String, String>>) -> Result<Self, ParametersError> {
        let mut parsed = Parameters::default();
        let mut complaints = Vec::new();
        for (name, value) in parameters.into_iter().flatten() {
            match name.as_str() {
                BYTES_PER_INODE => match bytes_per_inode(value) {
                    Ok(ratio) => parsed.bytes_per_inode = Some(ratio),
                    Err(complaint) => complaints.push(complaint),
                },
                _ => complaints.push(format!("unknown parameter {name:?}")),
            }
        }
        if complaints.is_empty() { Ok(parsed) } else { Err(ParametersError { complaints }) }
    }
}

impl fmt::Display for ParametersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}; allowed parameters: {BYTES_PER_INODE} (bytes of capacity per inode, a number from {BYTES_PER_INODE_MIN} to \
             {BYTES_PER_INODE_MAX})",
            self.complaints.join("; ")
        )
    }
}

impl std::error::Error for ParametersError {}

fn bytes_per_inode(value: &str) -> Result<NonZeroU64, String> {
    // `parse` alone would also take "+4096", which no other Kubernetes number does.
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.then(|| value.parse::<NonZeroU64>().ok()).flatten();
    match number {
        Some(ratio) if (BYTES_PER_INODE_MIN..=BYTES_PER_INODE_MAX).contains(&ratio.get()) => Ok(ratio),
        Some(_) | None => Err(format!("{BYTES_PER_INODE} is {value:?}")),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn class(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn nothing_given_is_the_default() {
        assert_eq!(Parameters::parse(None), Ok(Parameters::default()));
        assert_eq!(Parameters::parse(Some(&class(&[]))), Ok(Parameters::default()));
    }

    #[test]
    fn reads_the_ratio() {
        let parsed = Parameters::parse(Some(&class(&[("bytesPerInode", "16384")]))).unwrap();
        assert_eq!(parsed.bytes_per_inode, NonZeroU64::new(16384));
    }

    #[rstest]
    #[case::zero("0")]
    #[case::too_dense("511")]
    #[case::too_sparse("1073741825")]
    #[case::negative("-2048")]
    #[case::signed("+2048")]
    #[case::quantity("2Ki")]
    #[case::empty("")]
    #[case::overflow("99999999999999999999999")]
    fn refuses_ratios_and_names_them(#[case] value: &str) {
        let error = Parameters::parse(Some(&class(&[("bytesPerInode", value)]))).unwrap_err().to_string();
        assert!(error.contains(&format!("bytesPerInode is {value:?}")), "{error}");
        assert!(error.contains("512 to 1073741824"), "{error}");
    }

    #[test]
    fn lists_every_complaint_and_what_is_allowed() {
        let error =
            Parameters::parse(Some(&class(&[("bytesPerInode", "x"), ("fsType", "ext4"), ("typo", "")])));
        let error = error.unwrap_err().to_string();
        assert_eq!(
            error,
            "bytesPerInode is \"x\"; unknown parameter \"fsType\"; unknown parameter \"typo\"; allowed parameters: \
             bytesPerInode (bytes of capacity per inode, a number from 512 to 1073741824)"
        );
    }
}
