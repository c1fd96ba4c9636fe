//! Steps that several stories have in common, or that are a part of one.

pub(super) mod both_modes;
pub(super) mod component;
pub(super) mod detached_device;
pub(super) mod full_node;
pub(super) mod node_debug;
pub(super) mod node_without_storage;
pub(super) mod serving;
