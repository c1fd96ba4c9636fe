//! The contenders of the comparison: the provisioner and its peer.

/// The program that provisions, and the sources of its measurements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contender<'a> {
    pub(super) class: &'a str,
    pub(super) user: &'a str,
    pub(super) programs: &'a [&'a str],
}
