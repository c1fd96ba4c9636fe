//! Sizes of claims.

/// A size in whole mebibytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Size {
    mebibytes: u64,
}

impl Size {
    pub(crate) const fn mebibytes(mebibytes: u64) -> Size {
        Size { mebibytes }
    }

    pub(crate) const fn bytes(self) -> u64 {
        self.mebibytes << 20
    }

    /// Returns the Kubernetes quantity.
    pub(crate) fn quantity(self) -> String {
        format!("{}Mi", self.mebibytes)
    }
}
