//! The node's volume store, as the asynchronous tasks of the process use it.

pub(crate) mod claim_record;
pub(crate) mod custody;
pub(crate) mod in_flight;
pub(crate) mod storage;
pub(crate) mod throttle;
pub(crate) mod volumes;
