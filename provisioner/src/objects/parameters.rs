//! Parses all parameters of a StorageClass. The store defines which parameters and values exist.

use std::{collections::BTreeMap, fmt};

use csi_wire::reserved;
use loopfs::Bytes;
use loopfs::volume_store::{Setting, VolumeKind, VolumeSpec};

use crate::objects::loss_policy::{self, Policy};

/// The parameters of a storage class, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// The settings of volumes; kind and capacity in it have no meaning.
    settings: VolumeSpec,
    pub(crate) node_loss: Policy,
}

/// All errors in the parameters of a class together, so that an administrator can correct them in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParametersError {
    complaints: Vec<String>,
}

impl Parameters {
    /// Parses the parameters of a storage class.
    ///
    /// # Errors
    /// When a parameter is unknown or a value is malformed. The error names all of them, and the allowed parameters.
    /// Unknown parameters are not ignored: otherwise a class with a typing mistake would create volumes that it does not
    /// describe.
    pub(crate) fn parse(parameters: Option<&BTreeMap<String, String>>) -> Result<Self, ParametersError> {
        let mut settings = VolumeSpec::new(VolumeKind::Filesystem, Bytes(0));
        let mut node_loss = Policy::default();
        let mut complaints = Vec::new();
        for (name, value) in parameters.into_iter().flatten() {
            if let Some(checked) = reserved::of_class(name, value) {
                complaints.extend(checked.err());
                continue;
            }
            match node_loss.set(name, value) {
                Ok(true) => {}
                Ok(false) => {
                    complaints.extend(settings.set(name, value).err().map(|error| error.to_string()))
                }
                Err(error) => complaints.push(error.to_string()),
            }
        }
        if complaints.is_empty() {
            Ok(Self { settings, node_loss })
        } else {
            Err(ParametersError { complaints })
        }
    }

    /// Returns the specification of a volume with these parameters.
    pub(crate) fn spec(&self, kind: VolumeKind, capacity: Bytes) -> VolumeSpec {
        VolumeSpec { kind, capacity, ..self.settings }
    }
}

impl fmt::Display for ParametersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = VolumeSpec::SETTINGS.iter().map(Setting::to_string);
        let others = loss_policy::ALLOWED.into_iter().chain([reserved::FSTYPE]).map(str::to_owned);
        let allowed: Vec<String> = settings.chain(others).collect();
        write!(f, "{}; allowed parameters: {}", self.complaints.join("; "), allowed.join(", "))
    }
}

impl std::error::Error for ParametersError {}

#[cfg(test)]
mod tests {
    use loopfs::loop_device::DirectIo;
    use loopfs::volume_store::{LogicalBlockSize, Provisioning};

    use super::*;

    fn class(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn missing_parameters_have_their_defaults() {
        let spec = VolumeSpec::new(VolumeKind::Block, Bytes::MIB);
        for parameters in [None, Some(&class(&[]))] {
            assert_eq!(Parameters::parse(parameters).unwrap().spec(VolumeKind::Block, Bytes::MIB), spec);
        }
    }

    #[test]
    fn each_given_parameter_is_used() {
        let all = class(&[
            ("bytesPerInode", "16384"),
            ("directIO", "required"),
            ("logicalBlockSize", "4096"),
            ("provisioning", "thin"),
        ]);
        let spec = Parameters::parse(Some(&all)).unwrap().spec(VolumeKind::Block, Bytes::MIB);
        assert_eq!((spec.kind, spec.capacity), (VolumeKind::Block, Bytes::MIB));
        assert_eq!(spec.bytes_per_inode.get(), 16384);
        assert_eq!(spec.image.direct_io, DirectIo::Required);
        assert_eq!(spec.image.logical_block_size, Some(LogicalBlockSize::B4096));
        assert_eq!(spec.image.provisioning, Provisioning::Thin);
    }

    #[test]
    fn the_error_lists_all_problems_and_the_allowed_parameters() {
        let error = Parameters::parse(Some(&class(&[
            ("bytesPerInode", "x"),
            ("fsType", "ext4"),
            ("nodeLossGraceSeconds", "1h"),
            ("onNodeLoss", "delete"),
            ("provisioning", "sparse"),
            ("typo", ""),
        ])));
        let error = error.unwrap_err().to_string();
        assert_eq!(
            error,
            "bytesPerInode is \"x\"; unknown parameter \"fsType\"; nodeLossGraceSeconds is \"1h\"; \
             onNodeLoss is \"delete\"; provisioning is \"sparse\"; \
             unknown parameter \"typo\"; allowed parameters: \
             bytesPerInode (bytes of capacity per inode, a number from 512 to 1073741824), \
             directIO (required or preferred), logicalBlockSize (512 or 4096), provisioning (thick or thin), \
             onNodeLoss (retain, deleteVolume or deleteClaim), \
             nodeLossGraceSeconds (seconds after the deletion of the Node object, a number from 1 to 31536000), \
             csi.storage.k8s.io/fstype (xfs or empty)"
        );
    }

    #[test]
    fn parameters_of_external_provisioner_are_accepted() {
        let plain = Parameters::parse(None).unwrap();
        for fstype in ["", "xfs"] {
            let of_kubernetes = class(&[
                ("csi.storage.k8s.io/fstype", fstype),
                ("csi.storage.k8s.io/node-stage-secret-namespace", "shop"),
                ("csi.storage.k8s.io/provisioner-secret-name", "s"),
                ("csi.storage.k8s.io/secret-name", "s"),
            ]);
            assert_eq!(Parameters::parse(Some(&of_kubernetes)).unwrap(), plain);
        }
    }

    #[test]
    fn another_file_system_and_unknown_parameters_of_kubernetes_are_refused() {
        let error = Parameters::parse(Some(&class(&[
            ("csi.storage.k8s.io/fstype", "ext4"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/typo-secret-name", "s"),
        ])));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("csi.storage.k8s.io/fstype is \"ext4\": volumes are directories"), "{error}");
        for unknown in ["pvc/name", "typo-secret-name"] {
            let problem = format!("unknown parameter \"csi.storage.k8s.io/{unknown}\"");
            assert!(error.contains(&problem), "{error}");
        }
    }
}
