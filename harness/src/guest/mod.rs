//! What runs inside the virtual machine as PID 1, and the words in which host and guest talk.
//!
//! [`spec`] says what a guest is to do, [`report`] what it says back, [`control`] what can be asked of it
//! while it runs. The rest is the program itself; `src/bin/guest-init.rs` only starts it.

pub mod control;
pub mod report;
pub mod spec;

mod children;
mod disks;
mod init;
mod modprobe;
mod mounts;
mod node;
mod ports;
mod reporter;
mod requests;
mod services;
mod tests;

pub use init::main;
