//! The identity of this process: one driver on one node, and the names that are derived from the two.

use std::fmt;

/// The field manager of the objects that all provisioners write, and the value of their `managed-by` label.
pub(crate) const MANAGER: &str = "loopfs-provisioner";

/// The driver and the node this process serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    driver: String,
    node: String,
}

/// The error of an invalid driver or node name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum IdentityError {
    /// Kubernetes takes CSI driver names as DNS names of at most 63 characters.
    #[error(
        "driver name {0:?} is not usable: it must be 1 to 63 lower case letters, digits, '-' and '.', beginning and \
         ending with a letter or digit"
    )]
    Driver(String),
    /// The node name becomes a label value, which has a limit of its own.
    #[error(
        "node name {0:?} is not usable: it becomes the value of a label on every volume and so must be 1 to 63 letters, \
         digits, '-', '_' and '.', beginning and ending with a letter or digit"
    )]
    Node(String),
}

/// Longest label value, and longest last part of a label name.
const LABEL_MAX: usize = 63;

impl Identity {
    /// Checks the names.
    ///
    /// # Errors
    /// When a name cannot be used where Kubernetes needs it.
    pub(crate) fn new(driver: &str, node: &str) -> Result<Self, IdentityError> {
        let driver_ok =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
        if !is_label_like(driver, driver_ok) {
            return Err(IdentityError::Driver(driver.to_owned()));
        }
        if !is_label_value(node) {
            return Err(IdentityError::Node(node.to_owned()));
        }
        Ok(Identity { driver: driver.to_owned(), node: node.to_owned() })
    }

    /// Returns the name of the CSI driver, which storage classes name as their provisioner.
    pub(crate) fn driver(&self) -> &str {
        &self.driver
    }

    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    /// Returns the node label that the kubelet sets from the driver's topology. It is also the key of the node affinity of every
    /// PersistentVolume.
    pub(crate) fn topology_key(&self) -> String {
        format!("topology.{}/node", self.driver)
    }

    /// Returns the label that names the node of a PersistentVolume or claim, so that each node watches only its own.
    pub(crate) fn node_label(&self) -> String {
        format!("{}/node", self.driver)
    }

    /// Returns the selector of the objects whose label names a node.
    pub(crate) fn node_selector(&self, node: &str) -> String {
        format!("{}={node}", self.node_label())
    }

    /// Returns the volume attribute that names the file system of a volume.
    pub(crate) fn filesystem_uuid_attribute(&self) -> String {
        format!("{}/filesystem-uuid", self.driver)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.driver, self.node)
    }
}

/// Returns `true` if a label may have this text as its value, or as the last part of its key.
pub(crate) fn is_label_value(name: &str) -> bool {
    is_label_like(name, |byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn is_label_like(name: &str, allowed: impl Fn(u8) -> bool) -> bool {
    let bytes = name.as_bytes();
    let ends_ok = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    bytes.len() <= LABEL_MAX
        && ends_ok(bytes.first())
        && ends_ok(bytes.last())
        && bytes.iter().copied().all(allowed)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::empty("")]
    #[case::upper_case("CSI.example")]
    #[case::slash("csi/example")]
    #[case::leading_dash("-csi")]
    #[case::trailing_dot("csi.")]
    #[case::too_long(&"d".repeat(64))]
    fn invalid_driver_names_are_rejected(#[case] name: &str) {
        assert_eq!(Identity::new(name, "n"), Err(IdentityError::Driver(name.to_owned())));
    }

    #[rstest]
    #[case::empty("")]
    #[case::comma("a,b")]
    #[case::too_long_for_a_label(&"n".repeat(64))]
    fn invalid_node_names_are_rejected(#[case] name: &str) {
        assert_eq!(Identity::new("d", name), Err(IdentityError::Node(name.to_owned())));
    }
}
