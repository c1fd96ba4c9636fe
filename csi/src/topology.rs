//! Where the volumes are: on this node, and on no other.

use crate::driver::DriverName;
use crate::proto::csi::Topology;

/// The node this process serves, as orchestrators tell nodes apart.
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

    /// The topology of everything here.
    pub(crate) fn topology(&self) -> Topology {
        Topology { segments: [(self.key.clone(), self.name.clone())].into() }
    }

    /// Whether the node lies in a topology: each of its segments must be one the node has.
    pub(crate) fn lies_in(&self, topology: &Topology) -> bool {
        topology.segments.iter().all(|(key, value)| *key == self.key && *value == self.name)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::this_node(&[("topology.a.b/node", "n")], true)]
    #[case::everywhere(&[], true)]
    #[case::other_node(&[("topology.a.b/node", "m")], false)]
    #[case::other_key(&[("zone", "n")], false)]
    #[case::one_segment_too_many(&[("topology.a.b/node", "n"), ("zone", "z")], false)]
    fn topologies(#[case] segments: &[(&str, &str)], #[case] lies_in: bool) {
        let node = ThisNode::new(&"a.b".parse().unwrap(), "n".to_owned());
        let segments = segments.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(node.lies_in(&Topology { segments }), lies_in);
        assert!(node.lies_in(&node.topology()));
    }
}
