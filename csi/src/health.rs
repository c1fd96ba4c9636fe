//! What is wrong with volumes and with the storage under them, in the words of the specification.
//!
//! There are two: the condition, which orchestrators in use ask for, and the health, which version 1.13 has put in its place.

use loopfs::Condition;

use crate::proto::csi as wire;
use crate::proto::csi::VolumeHealthErrorType as VolumeError;
use crate::proto::csi::node_get_storage_health_response::StorageBackendHealth;
use crate::proto::csi::volume_health::VolumeHealthEntry;
use crate::volumes::Described;

impl From<Condition> for wire::VolumeCondition {
    fn from(condition: Condition) -> Self {
        match condition {
            Condition::Healthy => Self { abnormal: false, message: "healthy".to_owned() },
            Condition::Abnormal(message) => Self { abnormal: true, message },
        }
    }
}

impl From<Described> for wire::VolumeHealth {
    fn from(described: Described) -> Self {
        let Described { volume, capacity, condition, .. } = described;
        let (status, reason) = match capacity {
            Some(_) => (VolumeError::Degraded, "NotAsItWasMade"),
            None => (VolumeError::Inaccessible, "CannotBeOpened"),
        };
        let entry = |message| VolumeHealthEntry { status: status.into(), reason: reason.to_owned(), message };
        let health_statuses = match condition {
            Condition::Healthy => Vec::new(),
            Condition::Abnormal(message) => vec![entry(message)],
        };
        Self { volume_id: volume.to_string(), health_statuses }
    }
}

/// Health of the storage that all volumes here are on, given why it cannot be used.
pub(crate) fn of_storage(trouble: Option<String>) -> Vec<StorageBackendHealth> {
    let unreachable = |message| StorageBackendHealth {
        status: wire::StorageHealthErrorType::StorageUnreachable.into(),
        reason: "DataDirectoryUnusable".to_owned(),
        message,
        volume_capability: None,
    };
    trouble.map(unreachable).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use loopfs::{Bytes, VolumeId};
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::healthy(Some(1), Condition::Healthy, None)]
    #[case::limping(Some(1), Condition::Abnormal("a".to_owned()), Some(VolumeError::Degraded))]
    #[case::broken(None, Condition::Abnormal("a".to_owned()), Some(VolumeError::Inaccessible))]
    fn what_is_wrong_with_a_volume(
        #[case] capacity: Option<u64>,
        #[case] condition: Condition,
        #[case] expected: Option<VolumeError>,
    ) {
        let described = Described {
            volume: VolumeId::parse("v").unwrap(),
            capacity: capacity.map(Bytes),
            filesystem: "0123abcd-0000-4000-8000-00000000beef".parse().unwrap(),
            published: false,
            condition,
            source: None,
        };
        let health = wire::VolumeHealth::from(described);
        assert_eq!(health.volume_id, "v");
        assert_eq!(health.health_statuses.first().map(VolumeHealthEntry::status), expected);
    }
}
