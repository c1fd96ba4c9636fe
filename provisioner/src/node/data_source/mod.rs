//! What a claim's volume is to be filled with: nothing, or what another claim of its namespace holds, or a VolumeSnapshot of it.

mod claim;
mod find;
pub(crate) mod snapshot;
mod source;

pub(crate) use self::{
    find::find,
    source::{DataSource, reference},
};
