//! The kind of an error, as the processes of the model tests send it.

use loopfs::ErrorKind;
use serde::{Deserialize, Serialize};

/// The kinds of errors that a call can return without a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    NotFound,
    AlreadyExists,
    InvalidInput,
    NoSpace,
    NotHonoured,
    WouldShrink,
    Busy,
    Other,
}

impl From<ErrorKind> for Failure {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::NotFound => Self::NotFound,
            ErrorKind::AlreadyExists => Self::AlreadyExists,
            ErrorKind::InvalidInput => Self::InvalidInput,
            ErrorKind::NoSpace => Self::NoSpace,
            ErrorKind::NotHonoured => Self::NotHonoured,
            ErrorKind::WouldShrink => Self::WouldShrink,
            ErrorKind::Busy => Self::Busy,
            _ => Self::Other,
        }
    }
}
