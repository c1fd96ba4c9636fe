//! The node's volumes, of which the driver `loopfs-csi` is the only owner.

pub(crate) mod claim_record;
pub(crate) mod client;
pub(crate) mod driver;
pub(crate) mod in_flight;
pub(crate) mod storage;
