//! The exit codes of `dbg`. clap uses 2.

/// A condition is not met.
pub(super) const NOT_MET: u8 = 1;
/// The service could not be reached or refused the request, or a file could not be written.
pub(super) const FAILED: u8 = 3;
