//! The data source of a claim: none, another claim of its namespace, or a VolumeSnapshot of its namespace.

mod claim;
pub(crate) mod snapshot;
mod source;

pub(crate) use self::claim::find_volume;
pub(crate) use self::snapshot::find_snapshot;
pub(crate) use self::source::DataSource;
