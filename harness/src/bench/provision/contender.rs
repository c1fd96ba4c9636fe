//! What is compared: the provisioner, or its peer.

/// Who provisions, and where what it does can be seen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contender<'a> {
    pub(super) class: &'a str,
    pub(super) user: &'a str,
    pub(super) programs: &'a [&'a str],
}
