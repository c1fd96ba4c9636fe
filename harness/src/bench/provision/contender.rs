//! The contenders of the comparison: the provisioner and its peer.

/// The user name of the driver's pods at the API server.
pub(in crate::bench) const DRIVER_USER: &str = "system:serviceaccount:loopfs-system:loopfs-provisioner";

/// The program that provisions, and the sources of its measurements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contender<'a> {
    pub(super) class: &'a str,
    pub(super) user: &'a str,
    pub(super) programs: &'a [&'a str],
}
