//! The kubelet's record of the Block volume that a driver has published at a target.

use std::path::{Path, PathBuf};

use loopfs::volume_store::VolumeId;

use crate::driver::DriverName;

/// The driver and the volume of a target.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KubeletRecord {
    driver: String,
    volume: String,
}

impl KubeletRecord {
    /// Reads the record of a target. Returns `None` for a target of another orchestrator. Only the kubelet and administrators can write
    /// the file, unlike the label and the file of the device, which a pod can change.
    pub(crate) fn read(target: &Path) -> Option<Self> {
        parse(&std::fs::read(path_for(target)?).ok()?)
    }

    pub(crate) fn is_of(&self, driver: &DriverName) -> bool {
        self.driver == driver.as_str()
    }

    pub(crate) fn volume(&self) -> Option<VolumeId> {
        VolumeId::parse(&self.volume).ok()
    }
}

/// `volumeDevices/NAME/data/vol_data.json` belongs to the targets `volumeDevices/publish/NAME/POD`.
fn path_for(target: &Path) -> Option<PathBuf> {
    let of_volume = target.parent()?;
    let publish = of_volume.parent().filter(|directory| directory.ends_with("volumeDevices/publish"))?;
    Some(publish.parent()?.join(of_volume.file_name()?).join("data/vol_data.json"))
}

fn parse(text: &[u8]) -> Option<KubeletRecord> {
    let record: serde_json::Value = serde_json::from_slice(text).ok()?;
    let field = |name| record.get(name)?.as_str().map(str::to_owned);
    Some(KubeletRecord { driver: field("driverName")?, volume: field("volumeHandle")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_name_driver_and_volume() {
        let devices = tempfile::tempdir().unwrap().path().join("volumeDevices");
        let target = devices.join("publish/pv-1/pod");
        assert_eq!(KubeletRecord::read(&target), None);
        let data = devices.join("pv-1/data");
        std::fs::create_dir_all(&data).unwrap();
        let text =
            r#"{"attachmentID":"","driverName":"csi.loopfs.dev","specVolID":"pv-1","volumeHandle":"v"}"#;
        std::fs::write(data.join("vol_data.json"), text).unwrap();
        let record = KubeletRecord::read(&target).unwrap();
        assert_eq!(record.volume(), VolumeId::parse("v").ok());
        assert!(record.is_of(&"csi.loopfs.dev".parse().unwrap()));
        assert!(!record.is_of(&"second.loopfs.dev".parse().unwrap()));
        assert_eq!(KubeletRecord::read(&devices.join("staging/pv-1/pod")), None);
        std::fs::write(data.join("vol_data.json"), &text[..20]).unwrap();
        assert_eq!(KubeletRecord::read(&target), None);
    }
}
