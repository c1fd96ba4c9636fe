//! The topology of the volumes: all of them are on this node.

use csi_wire::csi::Topology;

use crate::driver::DriverName;

/// The node that this process serves, with its topology key.
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
    #[case::this_node(&[("topology.a.b/node", "n")], true)]
    #[case::everywhere(&[], true)]
    #[case::other_node(&[("topology.a.b/node", "m")], false)]
    #[case::other_key(&[("zone", "n")], false)]
    #[case::one_segment_too_many(&[("topology.a.b/node", "n"), ("zone", "z")], false)]
    fn a_node_lies_in_a_topology_if_it_has_all_segments(
        #[case] segments: &[(&str, &str)],
        #[case] lies_in: bool,
    ) {
        let node = ThisNode::new(&"a.b".parse().unwrap(), "n".to_owned());
        let segments = segments.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(node.lies_in(&Topology { segments }), lies_in);
        assert!(node.lies_in(&node.topology()));
    }
}
