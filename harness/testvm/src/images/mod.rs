//! The images of virtual machines and pods: kernels, root file systems, disks, container images.
//!
//! Each is built from data in [`Workspace::definitions`](crate::session::Workspace::definitions) and cached under a hash of its inputs. Nothing here needs root.
//! Packages come only from the mirror that this machine uses anyway.

pub mod debian_program;
pub mod disk;
pub mod kernel;
pub mod kind;
pub mod node;
pub mod oci;
pub mod rust_toolchain;
pub mod shell;
pub mod write_log;

mod debian;
mod debian_versions;
pub(crate) mod initramfs;
pub(crate) mod qemu;
