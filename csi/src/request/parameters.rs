//! The parameters of a volume from its StorageClass. The store defines their names and values.

use std::collections::HashMap;

use csi_wire::reserved;
use loopfs::Bytes;
use loopfs::volume_store::{Setting, VolumeKind, VolumeSpec};

use super::field::Result;
use crate::error::InvalidRequest;

const FIELD: &str = "parameters";

/// The settings of a new volume, apart from its kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// The settings. The kind and size in it have no meaning.
    settings: VolumeSpec,
}

impl Parameters {
    /// Refuses unknown parameters, because a StorageClass with a typing error would otherwise create volumes that
    /// differ from it. The error names all invalid parameters together.
    pub(super) fn parse(parameters: &HashMap<String, String>) -> Result<Self> {
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
        // A map has no order, and the message should be the same for each call.
        complaints.sort_unstable();
        let settings = VolumeSpec::SETTINGS.iter().map(Setting::to_string);
        let allowed: Vec<String> = settings.chain([reserved::FSTYPE.to_owned()]).collect();
        let problem = format!("{}; allowed: {}", complaints.join("; "), allowed.join(", "));
        Err(InvalidRequest::new(FIELD, problem))
    }

    /// Returns the specification of a volume with these settings.
    pub(crate) fn spec(&self, kind: VolumeKind, capacity: Bytes) -> VolumeSpec {
        VolumeSpec { kind, capacity, ..self.settings }
    }
}

#[cfg(test)]
mod tests {
    use loopfs::loop_device::DirectIo;
    use loopfs::volume_store::{LogicalBlockSize, Provisioning};

    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters> {
        Parameters::parse(
            &pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[test]
    fn missing_parameters_have_the_defaults_of_the_store() {
        let spec = VolumeSpec::new(VolumeKind::Block, Bytes::MIB);
        assert_eq!(parse(&[]).unwrap().spec(VolumeKind::Block, Bytes::MIB), spec);
    }

    #[test]
    fn each_parameter_sets_its_setting() {
        let all = [
            ("bytesPerInode", "16384"),
            ("directIO", "required"),
            ("logicalBlockSize", "4096"),
            ("provisioning", "thin"),
        ];
        let spec = parse(&all).unwrap().spec(VolumeKind::Block, Bytes::MIB);
        assert_eq!((spec.kind, spec.capacity), (VolumeKind::Block, Bytes::MIB));
        assert_eq!(spec.bytes_per_inode.get(), 16384);
        assert_eq!(spec.image.direct_io, DirectIo::Required);
        assert_eq!(spec.image.logical_block_size, Some(LogicalBlockSize::B4096));
        assert_eq!(spec.image.provisioning, Provisioning::Thin);
        // Fails if the store has a setting that this test does not set.
        assert_eq!(all.map(|(name, _)| name).to_vec(), {
            VolumeSpec::SETTINGS.iter().map(|setting| setting.name).collect::<Vec<_>>()
        });
    }

    #[test]
    fn the_error_lists_all_invalid_parameters_and_the_allowed_ones() {
        let error = parse(&[("typo", ""), ("bytesPerInode", "x"), ("fsType", "ext4"), ("directIO", "off")]);
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
        let plain = parse(&[("provisioning", "thin")]).unwrap();
        for fstype in ["", "xfs"] {
            let of_kubernetes = parse(&[
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
        let error = parse(&[
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
