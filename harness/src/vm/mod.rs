//! Virtual machines: what one is made of, the QEMU that runs it, and what it says.
//!
//! [`VmSpec`] is data. [`Vm::boot`] turns it into a running machine with one owner; dropping that owner is
//! a power cut. The guest talks over virtio ports of their own, apart from the console, which is only a log.

mod accelerator;
mod boot;
mod command;
mod console;
mod control;
mod hypervisor;
mod machine;
mod reports;
mod spec;

pub use accelerator::choose;
pub use boot::{GuestFile, initramfs};
pub use control::Control;
pub use hypervisor::{Accelerator, Hypervisor};
pub use machine::{ExitReason, Phase, Vm};
pub(crate) use reports::LineTimes;
pub use spec::{Disk, DiskMode, Forward, VmSpec};
