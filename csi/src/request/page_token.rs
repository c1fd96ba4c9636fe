//! Tokens of list pages.

use std::fmt;
use std::str::FromStr;

const AFTER: &str = "after:";

/// The last entry of the previous page. It is an id and not a position, so that created and deleted entries do not
/// shift the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PageToken<Id>(pub(crate) Id);

impl<Id: FromStr> PageToken<Id> {
    /// Returns `None` for a text that this driver did not return.
    pub(super) fn parse(text: &str) -> Option<Self> {
        text.strip_prefix(AFTER)?.parse().ok().map(Self)
    }
}

impl<Id: fmt::Display> fmt::Display for PageToken<Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(last) = self;
        write!(f, "{AFTER}{last}")
    }
}

#[cfg(test)]
mod tests {
    use loopfs::volume_store::{SnapshotId, VolumeId};
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_displayed_token_parses_to_itself() {
        let token = PageToken(VolumeId::parse("v-1").unwrap());
        assert_eq!(PageToken::parse(&token.to_string()), Some(token));
        let token = PageToken(SnapshotId::parse("s-1").unwrap());
        assert_eq!(PageToken::parse(&token.to_string()), Some(token));
    }

    #[rstest]
    #[case("invalid-token")]
    #[case("v-1")]
    #[case("after:")]
    #[case("after:../v")]
    #[case("2")]
    fn other_texts_are_not_tokens(#[case] text: &str) {
        assert_eq!(PageToken::<VolumeId>::parse(text), None);
    }
}
