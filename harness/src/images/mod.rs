//! What virtual machines and pods are made of: kernels, root file systems, disks, container images.
//!
//! Each is built from data in `vm-images` and kept in the cache under a hash of what went into it.
//! Nothing here needs root, and the only host asked for packages is the mirror this machine uses anyway.

pub mod disk;
pub mod initramfs;
pub mod kernel;
pub mod node;
pub mod oci;
pub mod qemu;
pub mod shell;
pub mod write_log;

mod debian;
