//! The component `claim-labels`: claims name their node in a label, and a node watches only its own claims.
//!
//! Each claim for which a node was selected has a label with the name of that node. The controller records in a ConfigMap that this holds
//! for all claims. While the ConfigMap says so, a node watches only claims with its own label, and what it receives does not grow with
//! the cluster. Otherwise it watches all claims, and misses none.
//!
//! `docs/decisions/0078-claim-labels.md` gives the reasons.

pub(crate) mod labeller;
pub(crate) mod labels;
pub(crate) mod scope;
