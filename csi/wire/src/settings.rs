//! The settings of a volume, from the parameters of its StorageClass. The store defines their names and values.

use std::collections::BTreeMap;
use std::fmt;

use loopfs::Bytes;
use loopfs::volume_store::{Setting, SettingError, VolumeKind, VolumeSpec};

use crate::reserved;

/// The settings of new volumes, apart from their kind and capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    parsed: VolumeSpec,
    pairs: BTreeMap<String, String>,
}

/// What is wrong with the parameters, all of it together, so that an administrator can correct it in one step, and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    complaints: Vec<String>,
    allowed: &'static [&'static str],
}

impl Settings {
    /// Reads parameters. `others` checks those that are no settings, and returns `None` if it does not know one; `allowed` describes them.
    ///
    /// # Errors
    /// If a parameter is unknown or has an invalid value. An unknown one is not ignored, because a class with a typing error would create
    /// volumes that differ from it.
    pub fn parse<'a>(
        parameters: impl IntoIterator<Item = (&'a String, &'a String)>,
        mut others: impl FnMut(&str, &str) -> Option<Result<(), String>>,
        allowed: &'static [&'static str],
    ) -> Result<Self, SettingsError> {
        // Not every map has an order, and the message should be the same each time.
        let mut parameters: Vec<_> = parameters.into_iter().collect();
        parameters.sort_unstable();
        let mut settings = Self::default();
        let complaint = |(name, value): (&String, &String)| match others(name, value) {
            Some(checked) => checked.err(),
            None => settings.set(name, value).err().map(|error| error.to_string()),
        };
        let complaints: Vec<String> = parameters.into_iter().filter_map(complaint).collect();
        if complaints.is_empty() { Ok(settings) } else { Err(SettingsError { complaints, allowed }) }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        self.parsed.set(name, value)?;
        self.pairs.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    /// Returns the names and values of the settings, as they were given. Settings that were not given have the defaults of the store.
    #[must_use]
    pub fn pairs(&self) -> &BTreeMap<String, String> {
        &self.pairs
    }

    /// Returns the specification of a volume with these settings.
    #[must_use]
    pub fn spec(&self, kind: VolumeKind, capacity: Bytes) -> VolumeSpec {
        VolumeSpec { kind, capacity, ..self.parsed.clone() }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self { parsed: VolumeSpec::new(VolumeKind::Filesystem, Bytes(0)), pairs: BTreeMap::new() }
    }
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = VolumeSpec::SETTINGS.iter().map(Setting::to_string);
        let others = self.allowed.iter().chain(&[reserved::FSTYPE]).map(ToString::to_string);
        let allowed: Vec<String> = settings.chain(others).collect();
        write!(f, "{}; allowed: {}", self.complaints.join("; "), allowed.join(", "))
    }
}

impl std::error::Error for SettingsError {}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use rstest::rstest;

    use super::*;

    type Check = fn(&str, &str) -> Option<Result<(), String>>;

    fn parse_with(check: Check, pairs: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Settings::parse(&pairs.collect::<HashMap<_, _>>(), check, &["colour (red or blue)"])
    }

    fn parse(pairs: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        parse_with(reserved::of_volume, pairs)
    }

    #[test]
    fn parameters_change_the_defaults_of_the_store() {
        let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes::MIB);
        assert_eq!(parse(&[]).unwrap().spec(VolumeKind::Block, Bytes::MIB), spec);
        spec.set("provisioning", "thin").unwrap();
        let parsed = parse(&[("provisioning", "thin")]).unwrap();
        assert_eq!(parsed.spec(VolumeKind::Block, Bytes::MIB), spec);
    }

    #[test]
    fn pairs_contain_only_the_settings() {
        let parsed = parse(&[("provisioning", "thin"), ("csi.storage.k8s.io/fstype", "xfs")]).unwrap();
        assert_eq!(*parsed.pairs(), [("provisioning".to_owned(), "thin".to_owned())].into());
    }

    #[test]
    fn error_lists_invalid_and_allowed_parameters() {
        let error = parse(&[("typo", ""), ("bytesPerInode", "x"), ("fsType", "ext4"), ("directIO", "off")]);
        let error = error.unwrap_err().to_string();
        let (complaints, allowed) = error.split_once("; allowed: ").unwrap();
        assert_eq!(
            complaints,
            "bytesPerInode is \"x\"; directIO is \"off\"; unknown parameter \"fsType\"; unknown parameter \"typo\""
        );
        for setting in VolumeSpec::SETTINGS {
            assert!(allowed.contains(&format!("{setting}, ")), "{allowed}");
        }
        assert!(
            allowed.ends_with(", colour (red or blue), csi.storage.k8s.io/fstype (xfs or empty)"),
            "{allowed}"
        );
    }

    /// external-provisioner adds the last three to a request, so a class does not have them.
    #[test]
    fn parameters_of_kubernetes_are_accepted() {
        let plain = parse(&[("provisioning", "thin")]).unwrap();
        for fstype in ["", "xfs"] {
            let of_class = [
                ("provisioning", "thin"),
                ("csi.storage.k8s.io/fstype", fstype),
                ("csi.storage.k8s.io/provisioner-secret-name", "s"),
                ("csi.storage.k8s.io/node-stage-secret-namespace", "shop"),
                ("csi.storage.k8s.io/secret-name", "s"),
            ];
            let added = [
                ("csi.storage.k8s.io/pv/name", "pvc-0"),
                ("csi.storage.k8s.io/pvc/name", "data"),
                ("csi.storage.k8s.io/pvc/namespace", "shop"),
            ];
            assert_eq!(parse_with(reserved::of_class, &of_class).unwrap(), plain);
            assert_eq!(parse(&[&of_class[..], &added].concat()).unwrap(), plain);
            assert!(parse_with(reserved::of_class, &added).is_err());
        }
    }

    /// And another file system than that of the volumes.
    #[rstest]
    #[case::of_class(reserved::of_class)]
    #[case::of_volume(reserved::of_volume)]
    fn unknown_reserved_parameters_are_refused(#[case] check: Check) {
        let error = parse_with(
            check,
            &[
                ("csi.storage.k8s.io/fstype", "ext4"),
                ("csi.storage.k8s.io/fsType", "xfs"),
                ("csi.storage.k8s.io/typo-secret-name", "s"),
                ("csi.storage.k8s.io/volumesnapshot/name", "s"),
            ],
        );
        let error = error.unwrap_err().to_string();
        assert!(error.contains("csi.storage.k8s.io/fstype is \"ext4\": volumes are directories"), "{error}");
        for unknown in ["fsType", "typo-secret-name", "volumesnapshot/name"] {
            let problem = format!("unknown parameter \"csi.storage.k8s.io/{unknown}\"");
            assert!(error.contains(&problem), "{error}");
        }
    }
}
