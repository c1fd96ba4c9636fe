//! The kinds of nodes that are compared.

use std::fmt;

use crate::node_options::NodeOptions;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Variant {
    /// The stock kubelet with losetup of util-linux.
    Stock,
    /// The stock kubelet with losetup of this project.
    DropIn,
    /// The patched kubelet, which starts no losetup.
    Patched,
}

impl Variant {
    pub(super) const ALL: [Variant; 3] = [Variant::Stock, Variant::DropIn, Variant::Patched];

    pub(super) fn options(self) -> NodeOptions {
        match self {
            Variant::Stock => NodeOptions::default(),
            Variant::DropIn => NodeOptions::with_drop_in_losetup(),
            Variant::Patched => NodeOptions::with_patched_kubelet(),
        }
    }

    /// Returns the name of the variant's row of a measurement.
    pub(super) fn row(self, measurement: &str) -> String {
        format!("{measurement}_{self}")
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Stock => "stock",
            Variant::DropIn => "drop_in",
            Variant::Patched => "patched",
        })
    }
}
