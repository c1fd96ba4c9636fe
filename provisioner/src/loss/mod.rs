//! Volumes whose data cannot be reached any more.

mod decision;

pub(crate) use self::decision::{Decision, Sight, decide};
