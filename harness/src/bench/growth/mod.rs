//! `bench growth`: from a claim that asks for more to the pod that sees it, and to a claim that says so.
//!
//! What the pod sees is said by a program in it that looks at its volume each millisecond. The clock is this machine's: from before the
//! patch is sent until the program's line has come through kubelet and API server, so the figure is an upper bound.

mod kubelet;
mod resizes;
mod run;
mod watched;

pub(super) use self::run::run;
