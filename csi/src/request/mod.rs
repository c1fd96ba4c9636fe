//! Converts protobuf messages to validated domain types. The conversions are pure functions. They are the only place
//! where optional fields are checked.

mod capability;
mod controller;
mod field;
mod name;
mod page_token;
mod path;
mod reader;
mod snapshots;

pub(crate) use capability::AccessType;
pub(crate) use controller::{
    CapacityQuery, ControllerExpand, Create, ExpectedProperties, ListRequest, Validate,
};
pub(crate) use field::CapacityRange;
pub(crate) use page_token::PageToken;
pub(crate) use path::TargetPath;
pub(crate) use reader::{GetStats, NodeExpand, Publish, RequestReader, Stage, Unpublish, Unstage};
pub(crate) use snapshots::{CreateSnapshot, Filter, ListSnapshots};

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
