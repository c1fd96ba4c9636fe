//! The kubelet's record of the Block volume that a driver has published at a target.

use std::path::{Path, PathBuf};

use loopfs::publish::Owner;
use loopfs::volume_store::VolumeId;

use crate::driver::DriverName;

/// Tells whether a driver of this name has published the device that is mounted at a path. It is unknown for a target of another
/// orchestrator. Only the kubelet and administrators can write the record, unlike the label and the file of the device, which a pod can
/// change.
pub(crate) fn owner(target: &Path, driver: &DriverName) -> Owner {
    let read = || {
        let record: serde_json::Value =
            serde_json::from_slice(&std::fs::read(path_for(target)?).ok()?).ok()?;
        let field = |name| record.get(name)?.as_str().map(str::to_owned);
        Some((field("driverName")?, field("volumeHandle")?))
    };
    match read() {
        None => Owner::Unknown,
        Some((name, _)) if name != driver.as_str() => Owner::OtherProgram,
        Some((_, volume)) => Owner::ThisProgram(VolumeId::parse(&volume).ok()),
    }
}

/// `volumeDevices/NAME/data/vol_data.json` belongs to the targets `volumeDevices/publish/NAME/POD`.
fn path_for(target: &Path) -> Option<PathBuf> {
    let of_volume = target.parent()?;
    let publish = of_volume.parent().filter(|directory| directory.ends_with("volumeDevices/publish"))?;
    Some(publish.parent()?.join(of_volume.file_name()?).join("data/vol_data.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_name_driver_and_volume() {
        let devices = tempfile::tempdir().unwrap().path().join("volumeDevices");
        let target = devices.join("publish/pv-1/pod");
        let driver = "csi.loopfs.dev".parse().unwrap();
        assert_eq!(owner(&target, &driver), Owner::Unknown);
        let data = devices.join("pv-1/data");
        std::fs::create_dir_all(&data).unwrap();
        let text =
            r#"{"attachmentID":"","driverName":"csi.loopfs.dev","specVolID":"pv-1","volumeHandle":"v"}"#;
        std::fs::write(data.join("vol_data.json"), text).unwrap();
        assert_eq!(owner(&target, &driver), Owner::ThisProgram(VolumeId::parse("v").ok()));
        assert_eq!(owner(&target, &"second.loopfs.dev".parse().unwrap()), Owner::OtherProgram);
        assert_eq!(owner(&devices.join("staging/pv-1/pod"), &driver), Owner::Unknown);
        std::fs::write(data.join("vol_data.json"), &text[..20]).unwrap();
        assert_eq!(owner(&target, &driver), Owner::Unknown);
    }
}
