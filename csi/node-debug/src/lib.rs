//! Facts about one node for people and programs that look for a fault: logs, conditions, a kubeconfig that expires soon, and
//! one archive of all that a bug report needs.
//!
//! The program `node-debug` serves them, and `dbg` is the client. README.md says how to use both.

#![forbid(unsafe_code)]

mod args;
mod client;
mod cluster;
mod conditions;
mod disk;
mod logs;
mod protected;
pub mod proto;
mod server;
mod service;
mod state;

pub use args::{Args, DEFAULT_SOCKET};
pub use client::{DbgArgs, DbgCommand, dbg};
pub use cluster::AllowedAccount;
pub use logs::{LineSource, LogSource};
pub use server::serve;
