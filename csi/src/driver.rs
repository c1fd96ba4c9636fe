//! The names of the driver and of its node, and the names derived from them.

use std::fmt;
use std::str::FromStr;

use csi_wire::csi::Topology;

/// The name of the CSI driver. It has the form that the specification allows for `GetPluginInfoResponse.name`, in lower
/// case, so that it is also a valid Kubernetes object name and label prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverName(String);

/// The maximum length that the specification allows.
const MAX_NAME_LEN: usize = 63;

impl DriverName {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the key of the topology segment and of the node label. The value is the node on which a volume is.
    #[must_use]
    pub fn topology_key(&self) -> String {
        format!("topology.{self}/node")
    }

    /// Returns the key in a volume's context that identifies the file system of the volume.
    #[must_use]
    pub fn filesystem_uuid_key(&self) -> String {
        format!("{self}/filesystem-uuid")
    }

    /// Returns the file name of the registration socket.
    #[must_use]
    pub fn registration_socket(&self) -> String {
        format!("{self}-reg.sock")
    }
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DriverName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let label = |label: &str| {
            let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            let bytes = label.as_bytes();
            bytes.first().is_some_and(alphanumeric)
                && bytes.last().is_some_and(alphanumeric)
                && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
        };
        if name.len() <= MAX_NAME_LEN && name.split('.').all(label) {
            return Ok(Self(name.to_owned()));
        }
        Err(format!(
            "must be a domain name in lower case of at most {MAX_NAME_LEN} characters, such as csi.example.org"
        ))
    }
}

/// The node that this process serves, with its topology key. All volumes are on this node.
#[derive(Clone, Debug)]
pub(crate) struct ThisNode {
    key: String,
    name: String,
}

impl ThisNode {
    pub(crate) fn new(driver_name: &DriverName, name: String) -> Self {
        Self { key: driver_name.topology_key(), name }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the topology of all volumes on this node.
    pub(crate) fn topology(&self) -> Topology {
        Topology { segments: [(self.key.clone(), self.name.clone())].into() }
    }

    /// Returns `true` if the node has each segment of the topology.
    pub(crate) fn lies_in(&self, topology: &Topology) -> bool {
        topology.segments.iter().all(|(key, value)| *key == self.key && *value == self.name)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("csi.loopfs.dev", true)]
    #[case("a", true)]
    #[case("a-b.c0", true)]
    #[case("", false)]
    #[case("Csi.dev", false)]
    #[case("a..b", false)]
    #[case("-a", false)]
    #[case("a.b-", false)]
    #[case("../a", false)]
    #[case("a/b", false)]
    #[case(&"a".repeat(64), false)]
    fn names_of_domain_form_are_valid(#[case] name: &str, #[case] valid: bool) {
        assert_eq!(name.parse::<DriverName>().is_ok(), valid);
    }

    #[rstest]
    #[case::this_node(&[("topology.a.b/node", "n")], true)]
    #[case::everywhere(&[], true)]
    #[case::other_node(&[("topology.a.b/node", "m")], false)]
    #[case::other_key(&[("zone", "n")], false)]
    #[case::one_segment_too_many(&[("topology.a.b/node", "n"), ("zone", "z")], false)]
    fn node_with_all_segments_matches_topology(#[case] segments: &[(&str, &str)], #[case] lies_in: bool) {
        let node = ThisNode::new(&"a.b".parse().unwrap(), "n".to_owned());
        let segments = segments.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(node.lies_in(&Topology { segments }), lies_in);
        assert!(node.lies_in(&node.topology()));
    }
}
