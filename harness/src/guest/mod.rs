//! The program that runs as PID 1 in the virtual machine, and the protocol between host and guest.
//!
//! [`spec`] specifies the work of a guest, [`report`] its messages, and [`control`] the requests to it while
//! it runs. The other modules are the program itself, which `src/bin/guest-init.rs` starts.

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
