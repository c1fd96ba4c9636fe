//! Names and sizes of the objects of the story.

use anyhow::Result;
use testvm_cluster::Node;

use crate::nodes::DATA_DIR;
use crate::test_env::inventory::Inventory;
use crate::test_env::sizes::Size;
use crate::test_env::workload::VolumeMode;

/// The size of the volumes of which snapshots are taken.
pub(super) const SIZE: Size = Size::mebibytes(1);

/// Returns the only volume of a pod, in the syntax of the test program.
pub(super) fn volume(mode: VolumeMode) -> [String; 1] {
    let kind = match mode {
        VolumeMode::Filesystem => "writable",
        VolumeMode::Block => "block",
    };
    [format!("{kind}:/vol")]
}

/// Returns the names of the snapshots in the store of a node.
pub(super) async fn snapshots_on(node: &Node) -> Result<Vec<String>> {
    let prefix = format!("{DATA_DIR}/snapshots/");
    let entries = Inventory::take(node).await?.added_since(&Inventory::default());
    let names = entries.iter().filter_map(|entry| entry.split_once(&prefix));
    // Entries below a snapshot are its content.
    Ok(names.map(|(_, name)| name.to_owned()).filter(|name| !name.contains('/')).collect())
}
