//! Converts the health of volumes and of their storage to CSI messages. The specification has two kinds of
//! messages: the volume condition, which current orchestrators read, and the volume health, which replaces it
//! in version 1.13.

use csi_wire::csi as wire;
use csi_wire::csi::VolumeHealthErrorType as VolumeError;
use csi_wire::csi::node_get_storage_health_response::StorageBackendHealth;
use csi_wire::csi::volume_health::VolumeHealthEntry;
use loopfs::volume_store::{AbnormalReason, Condition};

use crate::volumes::VolumeInfo;

/// Returns the condition of a volume as a message.
pub(super) fn condition(condition: Condition) -> wire::VolumeCondition {
    match condition {
        Condition::Healthy => wire::VolumeCondition { abnormal: false, message: "healthy".to_owned() },
        Condition::Abnormal { reason: _, message } => wire::VolumeCondition { abnormal: true, message },
    }
}

impl From<VolumeInfo> for wire::VolumeHealth {
    fn from(info: VolumeInfo) -> Self {
        let VolumeInfo { volume, condition, .. } = info;
        let entry = |reason, message| VolumeHealthEntry {
            status: error_type(reason).into(),
            reason: reason.to_string(),
            message,
        };
        let health_statuses = match condition {
            Condition::Healthy => Vec::new(),
            Condition::Abnormal { reason, message } => vec![entry(reason, message)],
        };
        Self { volume_id: volume.to_string(), health_statuses }
    }
}

fn error_type(reason: AbnormalReason) -> VolumeError {
    match reason {
        AbnormalReason::ImageTruncated | AbnormalReason::ImageMissing | AbnormalReason::DeviceOfOtherFile => {
            VolumeError::DataLoss
        }
        AbnormalReason::Unreadable | AbnormalReason::StorageFailed => VolumeError::Inaccessible,
        _ => VolumeError::Degraded,
    }
}

/// Returns the health of the storage of all volumes on this node, given the reason why it is unavailable.
pub(crate) fn of_storage(problem: Option<String>) -> Vec<StorageBackendHealth> {
    let unavailable = |message| StorageBackendHealth {
        status: wire::StorageHealthErrorType::StorageUnreachable.into(),
        reason: "DataDirectoryUnusable".to_owned(),
        message,
        volume_capability: None,
    };
    problem.map(unavailable).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use loopfs::Bytes;
    use loopfs::volume_store::VolumeId;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(AbnormalReason::ProjectChanged, VolumeError::Degraded)]
    #[case(AbnormalReason::ProjectNotInherited, VolumeError::Degraded)]
    #[case(AbnormalReason::FilesInForeignProject, VolumeError::Degraded)]
    #[case(AbnormalReason::ChargedForForeignFiles, VolumeError::Degraded)]
    #[case(AbnormalReason::SpaceTaken, VolumeError::Degraded)]
    #[case(AbnormalReason::DeviceChanged, VolumeError::Degraded)]
    #[case(AbnormalReason::ImageTruncated, VolumeError::DataLoss)]
    #[case(AbnormalReason::ImageMissing, VolumeError::DataLoss)]
    #[case(AbnormalReason::DeviceOfOtherFile, VolumeError::DataLoss)]
    #[case(AbnormalReason::Unreadable, VolumeError::Inaccessible)]
    #[case(AbnormalReason::StorageFailed, VolumeError::Inaccessible)]
    fn each_abnormal_reason_has_its_error_type(
        #[case] reason: AbnormalReason,
        #[case] expected: VolumeError,
    ) {
        let info = |condition| VolumeInfo {
            volume: VolumeId::parse("v").unwrap(),
            capacity: Some(Bytes(1)),
            filesystem: Some("0123abcd-0000-4000-8000-00000000beef".parse().unwrap()),
            published: false,
            condition,
            source: None,
        };
        let healthy = wire::VolumeHealth::from(info(Condition::Healthy));
        assert_eq!((healthy.volume_id.as_str(), healthy.health_statuses), ("v", Vec::new()));
        let health = wire::VolumeHealth::from(info(Condition::abnormal(reason, "why")));
        let [entry] = health.health_statuses.try_into().unwrap();
        assert_eq!(
            (entry.status(), entry.reason.as_str(), entry.message.as_str()),
            (expected, reason.as_str(), "why")
        );
    }
}
