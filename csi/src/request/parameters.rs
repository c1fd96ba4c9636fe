//! Parameters of a volume, as a storage class gives them.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;

use loopfs::VolumeSpec;

use super::{InvalidRequest, Result};

const FIELD: &str = "parameters";

const BYTES_PER_INODE: &str = "bytesPerInode";

/// An inode takes 512 bytes on disk, so fewer promise what the file system cannot hold; with more, a volume of
/// ordinary size could hold no files at all.
const BYTES_PER_INODE_RANGE: RangeInclusive<u64> = 512..=1 << 30;

/// What a volume is made with, beside its kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// A Filesystem volume may hold one inode for each so many bytes of capacity.
    pub(crate) bytes_per_inode: NonZeroU64,
}

impl Parameters {
    /// What is not known is refused: a class with a typing mistake would otherwise make volumes it does not describe.
    /// Everything that is wrong is named at once.
    pub(super) fn read(parameters: &HashMap<String, String>) -> Result<Self> {
        let mut read = Self { bytes_per_inode: VolumeSpec::BYTES_PER_INODE };
        let mut complaints = Vec::new();
        for (name, value) in parameters {
            match (name.as_str(), bytes_per_inode(value)) {
                (BYTES_PER_INODE, Some(ratio)) => read.bytes_per_inode = ratio,
                (BYTES_PER_INODE, None) => complaints.push(format!("{name} is {value:?}")),
                _ => complaints.push(format!("unknown parameter {name:?}")),
            }
        }
        if complaints.is_empty() {
            return Ok(read);
        }
        // A map has no order, and a message should not change from call to call.
        complaints.sort_unstable();
        Err(InvalidRequest::new(
            FIELD,
            format!(
                "{}; allowed: {BYTES_PER_INODE} (bytes of capacity per inode, a number from {} to {})",
                complaints.join("; "),
                BYTES_PER_INODE_RANGE.start(),
                BYTES_PER_INODE_RANGE.end()
            ),
        ))
    }
}

fn bytes_per_inode(value: &str) -> Option<NonZeroU64> {
    // `parse` alone would also take "+4096".
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    let ratio = digits.then(|| value.parse::<NonZeroU64>().ok()).flatten()?;
    BYTES_PER_INODE_RANGE.contains(&ratio.get()).then_some(ratio)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Parameters> {
        Parameters::read(
            &pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[rstest]
    #[case::default(&[], 2048)]
    #[case::given(&[("bytesPerInode", "16384")], 16384)]
    #[case::densest(&[("bytesPerInode", "512")], 512)]
    #[case::sparsest(&[("bytesPerInode", "1073741824")], 1 << 30)]
    fn taken(#[case] pairs: &[(&str, &str)], #[case] ratio: u64) {
        assert_eq!(read(pairs).unwrap().bytes_per_inode.get(), ratio);
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
    fn ratios_that_are_refused(#[case] value: &str) {
        let error = read(&[("bytesPerInode", value)]).unwrap_err().to_string();
        assert!(error.contains(&format!("bytesPerInode is {value:?}")), "{error}");
    }

    #[test]
    fn a_refusal_lists_every_complaint_and_what_is_allowed() {
        let error = read(&[("typo", ""), ("bytesPerInode", "x"), ("fsType", "ext4")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "parameters: bytesPerInode is \"x\"; unknown parameter \"fsType\"; unknown parameter \"typo\"; allowed: \
             bytesPerInode (bytes of capacity per inode, a number from 512 to 1073741824)"
        );
    }
}
