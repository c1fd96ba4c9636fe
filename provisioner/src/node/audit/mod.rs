//! Whether volumes and their objects fit together: volumes that no `PersistentVolume` names, and objects whose volume is not there.
//!
//! Both are told. A volume that nobody names is removed only where that was asked for, after a time of grace: an object may
//! have been taken away in order to bind its data anew. What an object names is never removed here, whoever made the object, and an
//! object is never removed at all.

mod compare;
mod report;
mod run;

pub(crate) use self::{
    report::report,
    run::{Collection, Settings, run},
};
