//! `bench node`: the tools of a node, of the distribution and of this project.

mod losetup;
mod run;

pub(super) use self::run::run;
