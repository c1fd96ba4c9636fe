//! Duties that concern objects of the whole cluster. Each provisioner performs them; they need no volume store.

pub(crate) mod builtin;
pub(crate) mod node_loss;
