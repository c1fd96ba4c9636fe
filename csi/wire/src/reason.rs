//! The reason of an error, in the metadata of its status. Many reasons share one gRPC code, which orchestrators rely on, and the
//! provisioner distinguishes them.

use loopfs::{ErrorKind, FilesystemUuid};
use tonic::Status;
use tonic::metadata::MetadataValue;

const REASON: &str = "loopfs-reason";
const FILESYSTEM_UUID: &str = "loopfs-filesystem-uuid";

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The store refused it.
    Store(ErrorKind),
    /// Another call works on the volume, or the driver has just started and opens the storage.
    Pending,
    /// The storage is not open.
    Unavailable,
    /// The volume is on another file system than the present one.
    OtherFilesystem(FilesystemUuid),
    /// A defect of the driver.
    Defect,
}

const KINDS: [(ErrorKind, &str); 18] = [
    (ErrorKind::NotFound, "NotFound"),
    (ErrorKind::AlreadyExists, "AlreadyExists"),
    (ErrorKind::InvalidInput, "InvalidInput"),
    (ErrorKind::NoSpace, "NoSpace"),
    (ErrorKind::WouldShrink, "WouldShrink"),
    (ErrorKind::Conflict, "Conflict"),
    (ErrorKind::Busy, "Busy"),
    (ErrorKind::NotEnforced, "NotEnforced"),
    (ErrorKind::NotMounted, "NotMounted"),
    (ErrorKind::NeverMounted, "NeverMounted"),
    (ErrorKind::WrongFilesystem, "WrongFilesystem"),
    (ErrorKind::NotHonoured, "NotHonoured"),
    (ErrorKind::Unsupported, "Unsupported"),
    (ErrorKind::PermissionDenied, "PermissionDenied"),
    (ErrorKind::InUserNamespace, "InUserNamespace"),
    (ErrorKind::ReadOnly, "ReadOnly"),
    (ErrorKind::ShutDown, "ShutDown"),
    (ErrorKind::Damaged, "Damaged"),
];

impl Reason {
    /// Adds the reason to a status.
    pub fn add_to(self, status: &mut Status) {
        let name = match self {
            Self::Store(kind) => {
                KINDS.iter().find(|(other, _)| *other == kind).map_or("Other", |(_, name)| *name)
            }
            Self::Pending => "Pending",
            Self::Unavailable => "Unavailable",
            Self::OtherFilesystem(_) => "OtherFilesystem",
            Self::Defect => "Defect",
        };
        let metadata = status.metadata_mut();
        metadata.insert(REASON, MetadataValue::from_static(name));
        if let Self::OtherFilesystem(present) = self
            && let Ok(present) = present.to_string().parse()
        {
            metadata.insert(FILESYSTEM_UUID, present);
        }
    }

    /// Reads the reason from a status. Returns `None` if the driver gave none: the error is one of the transport.
    #[must_use]
    pub fn of(status: &Status) -> Option<Self> {
        let text = |key| status.metadata().get(key).and_then(|value| value.to_str().ok());
        Some(match text(REASON)? {
            "Pending" => Self::Pending,
            "Unavailable" => Self::Unavailable,
            "OtherFilesystem" => Self::OtherFilesystem(text(FILESYSTEM_UUID)?.parse().ok()?),
            "Defect" => Self::Defect,
            name => {
                let kind = KINDS.iter().find(|(_, other)| *other == name);
                Self::Store(kind.map_or(ErrorKind::Other, |(kind, _)| *kind))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn each_reason_reads_back() {
        let present = "0123abcd-0000-4000-8000-00000000beef".parse().unwrap();
        let kinds = KINDS.map(|(kind, _)| Reason::Store(kind));
        let others = [
            Reason::Store(ErrorKind::Other),
            Reason::Pending,
            Reason::Unavailable,
            Reason::OtherFilesystem(present),
            Reason::Defect,
        ];
        for reason in kinds.into_iter().chain(others) {
            let mut status = Status::new(Code::Aborted, "why");
            assert_eq!(Reason::of(&status), None);
            reason.add_to(&mut status);
            assert_eq!(Reason::of(&status), Some(reason));
        }
    }
}
