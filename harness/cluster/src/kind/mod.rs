//! Kubernetes in containers, as users of kind have it: one virtual machine with Docker, in which kind makes a cluster.
//!
//! [`KindParts`] has the disks of the machine, [`KindMachine`] is the machine while it runs. The node image is our own,
//! because no container registry is used: see `kind/node-image` of the definitions.

mod machine;
mod node_image;
mod parts;

pub use self::machine::{CHECKOUT, KindMachine, SPARE_DISK};
pub use self::parts::{KindParts, KindPlan};
