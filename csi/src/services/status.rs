//! The table from errors to gRPC codes. The code determines whether an orchestrator retries, gives up, or permits the
//! user to reduce a requested size again.

use csi_wire::reason::Reason;
use loopfs::ErrorKind;
use tonic::{Code, Status};

use crate::error::Error;

/// The maximum length of a message in bytes. A status is sent in HTTP/2 headers, whose size clients limit. Longer
/// messages are truncated.
const MAX_MESSAGE_LEN: usize = 2048;

impl Error {
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::WrongAccessType(_) | Self::UnsuitableSource(_) => Code::InvalidArgument,
            Self::OperationPending(_) | Self::Temporary(_) | Self::StaleToken(_) => Code::Aborted,
            Self::StorageUnavailable(_)
            | Self::StorageStarting
            | Self::Precondition(_)
            | Self::OtherFilesystem { .. } => Code::FailedPrecondition,
            Self::Storage(error) => code_of(error.kind()),
            Self::Incompatible(_) => Code::AlreadyExists,
            // Only requests to create a volume or snapshot return this error. The orchestrator then tries another node.
            Self::NotOnThisNode(_) => Code::ResourceExhausted,
            Self::NotPublished(_)
            | Self::NoSuchVolume(_)
            | Self::NoSuchSnapshot(_)
            | Self::SourceNotFound(_) => Code::NotFound,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::File { .. } | Self::Defect(_) => Code::Internal,
        }
    }

    /// Returns the reason for a client that knows more than the gRPC codes.
    fn reason(&self) -> Reason {
        match self {
            Self::OperationPending(_) | Self::Temporary(_) => Reason::Pending,
            Self::StorageUnavailable(_) | Self::StorageStarting => Reason::Unavailable,
            Self::OtherFilesystem { present, .. } => Reason::OtherFilesystem(*present),
            Self::Defect(_) => Reason::Defect,
            Self::Storage(error) => Reason::Store(error.kind()),
            Self::Invalid(_) => Reason::Store(ErrorKind::InvalidInput),
            Self::NoSuchVolume(_) | Self::NoSuchSnapshot(_) | Self::SourceNotFound(_) => {
                Reason::Store(ErrorKind::NotFound)
            }
            _ => Reason::Store(ErrorKind::Other),
        }
    }
}

fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::InvalidInput => Code::InvalidArgument,
        // This is never ResourceExhausted: external-resizer treats that code as an expansion that may still be running,
        // and the user could then not request less. Requests to create a volume return Error::NotOnThisNode instead.
        ErrorKind::NoSpace | ErrorKind::WouldShrink => Code::OutOfRange,
        ErrorKind::Busy => Code::Aborted,
        ErrorKind::NotEnforced
        | ErrorKind::NotMounted
        | ErrorKind::NeverMounted
        | ErrorKind::WrongFilesystem
        | ErrorKind::ReadOnly
        | ErrorKind::Conflict
        | ErrorKind::ShutDown
        | ErrorKind::Damaged
        | ErrorKind::NotHonoured
        | ErrorKind::Unsupported => Code::FailedPrecondition,
        // The driver lacks a Linux capability. Its deployment causes that, not the client.
        ErrorKind::PermissionDenied | ErrorKind::Other => Code::Internal,
        _ => Code::Internal,
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let (code, reason) = (error.code(), error.reason());
        let mut message = error.to_string();
        if message.len() > MAX_MESSAGE_LEN {
            let fits = |end: &usize| message.is_char_boundary(*end);
            message.truncate((0..=MAX_MESSAGE_LEN).rev().find(fits).unwrap_or(0));
            message.push('…');
        }
        let mut status = Self::new(code, message);
        reason.add_to(&mut status);
        status
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
    #[case(ErrorKind::Conflict, Code::FailedPrecondition)]
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
    fn each_error_kind_has_its_code(#[case] kind: ErrorKind, #[case] code: Code) {
        assert_eq!(code_of(kind), code);
    }

    #[test]
    fn a_status_has_the_message_of_the_error_truncated_to_the_maximum() {
        let status = Status::from(Error::Precondition("ü".repeat(MAX_MESSAGE_LEN)));
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().len() <= MAX_MESSAGE_LEN + '…'.len_utf8());
        assert_eq!(Status::from(Error::NotPublished("not there".to_owned())).message(), "not there");
    }
}
