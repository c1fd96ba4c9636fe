//! `bench node`: the tools and the kubelet of a node, of the distribution and of this project.

mod losetup;
mod pods;
mod run;
mod stats;
mod variant;

pub(super) use self::run::run;
