//! The data source of a claim: none, another claim of its namespace, or a VolumeSnapshot of its namespace.

mod claim;
mod find;
pub(crate) mod snapshot;
mod source;

pub(crate) use self::{find::find, source::DataSource};
