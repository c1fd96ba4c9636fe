//! `bench growth`: the time from the request to expand a claim until the pod sees the new size, and until the
//! claim's status has it.
//!
//! A program in the pod reads the size of its volume every millisecond and reports the new one. This
//! machine's clock measures from just before the patch is sent until the program's line arrives through
//! kubelet and API server. The result is therefore an upper bound.

mod kubelet;
mod resizes;
mod run;
mod watched;

pub(super) use self::run::run;
