//! Parses all parameters of a StorageClass.

use std::collections::BTreeMap;

use csi_wire::{Settings, SettingsError, reserved};

use crate::objects::loss_policy::{self, Policy};

/// The parameters of a storage class, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parameters {
    pub(crate) settings: Settings,
    pub(crate) node_loss: Policy,
}

impl Parameters {
    /// Parses the parameters of a storage class.
    ///
    /// # Errors
    /// When a parameter is unknown or a value is malformed.
    pub(crate) fn parse(parameters: Option<&BTreeMap<String, String>>) -> Result<Self, SettingsError> {
        let mut node_loss = Policy::default();
        let others = |name: &str, value: &str| match node_loss.set(name, value) {
            Ok(true) => Some(Ok(())),
            Ok(false) => reserved::of_class(name, value),
            Err(error) => Some(Err(error)),
        };
        let settings = Settings::parse(parameters.into_iter().flatten(), others, loss_policy::ALLOWED)?;
        Ok(Parameters { settings, node_loss })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_lists_problems_and_allowed_parameters() {
        let class = [
            ("bytesPerInode", "x"),
            ("nodeLossGraceSeconds", "1h"),
            ("onNodeLoss", "delete"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ];
        let class = class.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let error = Parameters::parse(Some(&class)).unwrap_err().to_string();
        let complaints = "bytesPerInode is \"x\"; unknown parameter \"csi.storage.k8s.io/pvc/name\"; nodeLossGraceSeconds is \"1h\"; \
                          onNodeLoss is \"delete\"; allowed: ";
        assert!(error.starts_with(complaints), "{error}");
        assert!(loss_policy::ALLOWED.iter().all(|allowed| error.contains(allowed)), "{error}");
    }
}
