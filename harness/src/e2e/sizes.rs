//! Sizes as claims write them.

/// A size in whole mebibytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Size {
    mebibytes: u64,
}

impl Size {
    pub(super) const fn mebibytes(mebibytes: u64) -> Size {
        Size { mebibytes }
    }

    pub(super) const fn bytes(self) -> u64 {
        self.mebibytes << 20
    }

    /// As a Kubernetes quantity.
    pub(super) fn quantity(self) -> String {
        format!("{}Mi", self.mebibytes)
    }
}
