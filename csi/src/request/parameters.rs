//! Parameters of a volume, as a storage class gives them. Which there are and what they may say is the store's to know.

use std::collections::HashMap;

use loopfs::{Bytes, Setting, VolumeKind, VolumeSpec};

use super::field::Result;
use super::reserved;
use crate::error::InvalidRequest;

const FIELD: &str = "parameters";

/// What a volume is made with, beside its kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Of which kind and size mean nothing.
    settings: VolumeSpec,
}

impl Parameters {
    /// What is not known is refused: a class with a typing mistake would otherwise make volumes it does not describe.
    /// Everything that is wrong is named at once.
    pub(super) fn read(parameters: &HashMap<String, String>) -> Result<Self> {
        let mut settings = VolumeSpec::new(VolumeKind::Filesystem, Bytes(0));
        let mut complaints: Vec<String> = parameters
            .iter()
            .filter_map(|(name, value)| match reserved::of_volume(name, value) {
                Some(checked) => checked.err(),
                None => settings.set(name, value).err().map(|error| error.to_string()),
            })
            .collect();
        if complaints.is_empty() {
            return Ok(Self { settings });
        }
        // A map has no order, and a message should not change from call to call.
        complaints.sort_unstable();
        let settings = VolumeSpec::SETTINGS.iter().map(Setting::to_string);
        let allowed: Vec<String> = settings.chain([reserved::FSTYPE.to_owned()]).collect();
        let problem = format!("{}; allowed: {}", complaints.join("; "), allowed.join(", "));
        Err(InvalidRequest::new(FIELD, problem))
    }

    /// A volume made with them.
    pub(crate) fn spec(&self, kind: VolumeKind, capacity: Bytes) -> VolumeSpec {
        VolumeSpec { kind, capacity, ..self.settings }
    }
}

#[cfg(test)]
mod tests {
    use loopfs::{ImageDirectIo, LogicalBlockSize, Provisioning};

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Parameters> {
        Parameters::read(
            &pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[test]
    fn nothing_given_is_the_stores_default() {
        let spec = VolumeSpec::new(VolumeKind::Block, Bytes::MIB);
        assert_eq!(read(&[]).unwrap().spec(VolumeKind::Block, Bytes::MIB), spec);
    }

    #[test]
    fn each_that_is_given_is_taken() {
        let all = [
            ("bytesPerInode", "16384"),
            ("directIO", "required"),
            ("logicalBlockSize", "4096"),
            ("provisioning", "thin"),
        ];
        let spec = read(&all).unwrap().spec(VolumeKind::Block, Bytes::MIB);
        assert_eq!((spec.kind, spec.capacity), (VolumeKind::Block, Bytes::MIB));
        assert_eq!(spec.bytes_per_inode.get(), 16384);
        assert_eq!(spec.image.direct_io, ImageDirectIo::Required);
        assert_eq!(spec.image.logical_block_size, Some(LogicalBlockSize::B4096));
        assert_eq!(spec.image.provisioning, Provisioning::Thin);
        // So that a setting that is added is also read here.
        assert_eq!(all.map(|(name, _)| name).to_vec(), {
            VolumeSpec::SETTINGS.iter().map(|setting| setting.name).collect::<Vec<_>>()
        });
    }

    #[test]
    fn a_refusal_lists_every_complaint_and_what_is_allowed() {
        let error = read(&[("typo", ""), ("bytesPerInode", "x"), ("fsType", "ext4"), ("directIO", "off")]);
        assert_eq!(
            error.unwrap_err().to_string(),
            "parameters: bytesPerInode is \"x\"; directIO is \"off\"; unknown parameter \"fsType\"; \
             unknown parameter \"typo\"; allowed: \
             bytesPerInode (bytes of capacity per inode, a number from 512 to 1073741824), \
             directIO (required or preferred), logicalBlockSize (512 or 4096), provisioning (thick or thin), \
             csi.storage.k8s.io/fstype (xfs or empty)"
        );
    }

    #[test]
    fn parameters_of_kubernetes_and_its_sidecars_are_accepted() {
        let plain = read(&[("provisioning", "thin")]).unwrap();
        for fstype in ["", "xfs"] {
            let of_kubernetes = read(&[
                ("csi.storage.k8s.io/fstype", fstype),
                ("csi.storage.k8s.io/pv/name", "pvc-0"),
                ("csi.storage.k8s.io/pvc/name", "data"),
                ("csi.storage.k8s.io/pvc/namespace", "shop"),
                ("csi.storage.k8s.io/provisioner-secret-name", "s"),
                ("csi.storage.k8s.io/node-stage-secret-namespace", "shop"),
                ("csi.storage.k8s.io/secret-name", "s"),
                ("provisioning", "thin"),
            ]);
            assert_eq!(of_kubernetes.unwrap(), plain);
        }
    }

    #[test]
    fn another_file_system_and_unknown_parameters_of_kubernetes_are_refused() {
        let error = read(&[
            ("csi.storage.k8s.io/fstype", "ext4"),
            ("csi.storage.k8s.io/fsType", "xfs"),
            ("csi.storage.k8s.io/typo-secret-name", "s"),
            ("csi.storage.k8s.io/volumesnapshot/name", "s"),
        ]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("csi.storage.k8s.io/fstype is \"ext4\": volumes are directories"), "{error}");
        for unknown in ["fsType", "typo-secret-name", "volumesnapshot/name"] {
            let problem = format!("unknown parameter \"csi.storage.k8s.io/{unknown}\"");
            assert!(error.contains(&problem), "{error}");
        }
    }
}
