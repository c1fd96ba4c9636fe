//! The one table from errors to gRPC codes. Orchestrators act on the code: which of them is final, which is retried and
//! which lets a user take an expansion back.

use loopfs::ErrorKind;
use tonic::{Code, Status};

use crate::error::Error;

/// A status travels in HTTP/2 headers, which peers bound; the message is cut before that.
const MAX_MESSAGE_LEN: usize = 2048;

impl Error {
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::WrongAccessType(_) | Self::UnsuitableSource(_) => Code::InvalidArgument,
            Self::OperationPending(_) | Self::Temporary(_) | Self::StaleToken(_) => Code::Aborted,
            Self::StorageUnavailable(_) | Self::StorageStarting | Self::Precondition(_) => {
                Code::FailedPrecondition
            }
            Self::Storage(error) => code_of(error.kind()),
            Self::PublishedDifferently(_) | Self::Incompatible(_) => Code::AlreadyExists,
            // Said of making volumes only: the orchestrator tries another node.
            Self::NotOnThisNode(_) => Code::ResourceExhausted,
            Self::NotPublished(_)
            | Self::NoSuchVolume(_)
            | Self::NoSuchSnapshot(_)
            | Self::SourceNotFound(_) => Code::NotFound,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::Target { .. } | Self::Defect(_) => Code::Internal,
        }
    }
}

fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::InvalidInput => Code::InvalidArgument,
        // Never ResourceExhausted, which resizers read as "may still be running": the user could not ask for less. Where a
        // volume is made it does not come to this (Error::NotOnThisNode).
        ErrorKind::NoSpace | ErrorKind::WouldShrink => Code::OutOfRange,
        ErrorKind::Busy => Code::Aborted,
        ErrorKind::NotEnforced
        | ErrorKind::NotMounted
        | ErrorKind::NeverMounted
        | ErrorKind::WrongFilesystem
        | ErrorKind::ReadOnly
        | ErrorKind::ShutDown
        | ErrorKind::Damaged
        | ErrorKind::NotHonoured
        | ErrorKind::Unsupported => Code::FailedPrecondition,
        // The driver lacks a capability: the fault of its deployment, not of the caller.
        ErrorKind::PermissionDenied | ErrorKind::Other => Code::Internal,
        _ => Code::Internal,
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut message = error.to_string();
        if message.len() > MAX_MESSAGE_LEN {
            let fits = |end: &usize| message.is_char_boundary(*end);
            message.truncate((0..=MAX_MESSAGE_LEN).rev().find(fits).unwrap_or(0));
            message.push('…');
        }
        Self::new(error.code(), message)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(ErrorKind::NotFound, Code::NotFound)]
    #[case(ErrorKind::AlreadyExists, Code::AlreadyExists)]
    #[case(ErrorKind::InvalidInput, Code::InvalidArgument)]
    #[case(ErrorKind::NoSpace, Code::OutOfRange)]
    #[case(ErrorKind::WouldShrink, Code::OutOfRange)]
    #[case(ErrorKind::Busy, Code::Aborted)]
    #[case(ErrorKind::NotEnforced, Code::FailedPrecondition)]
    #[case(ErrorKind::NotMounted, Code::FailedPrecondition)]
    #[case(ErrorKind::NeverMounted, Code::FailedPrecondition)]
    #[case(ErrorKind::WrongFilesystem, Code::FailedPrecondition)]
    #[case(ErrorKind::ReadOnly, Code::FailedPrecondition)]
    #[case(ErrorKind::ShutDown, Code::FailedPrecondition)]
    #[case(ErrorKind::Damaged, Code::FailedPrecondition)]
    #[case(ErrorKind::NotHonoured, Code::FailedPrecondition)]
    #[case(ErrorKind::Unsupported, Code::FailedPrecondition)]
    #[case(ErrorKind::PermissionDenied, Code::Internal)]
    #[case(ErrorKind::Other, Code::Internal)]
    fn each_kind_has_its_code(#[case] kind: ErrorKind, #[case] code: Code) {
        assert_eq!(code_of(kind), code);
    }

    #[test]
    fn a_status_says_what_the_error_says_within_bounds() {
        let status = Status::from(Error::Precondition("ü".repeat(MAX_MESSAGE_LEN)));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().len() <= MAX_MESSAGE_LEN + '…'.len_utf8());
        assert_eq!(Status::from(Error::NotPublished("not there".to_owned())).message(), "not there");
    }
}
