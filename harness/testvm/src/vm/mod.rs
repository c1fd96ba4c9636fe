//! Virtual machines: their specification, the QEMU process that runs one, and the messages of the guest.
//!
//! [`VmSpec`] is data. [`Vm::boot`] turns it into a running machine with one owner; dropping that owner cuts
//! the power. The guest communicates over virtio ports of their own. The console is only a log.

mod accelerator;
mod boot;
mod command;
mod console;
mod control;
mod ending;
mod hypervisor;
mod machine;
mod monitor;
mod phase;
mod repeated_boots;
mod reports;
mod spec;
mod sysrq;

pub use accelerator::choose;
pub use boot::{GuestFile, initramfs};
pub use control::Control;
pub use hypervisor::{Accelerator, Hypervisor};
pub use machine::Vm;
pub use phase::{ExitReason, Phase};
pub use repeated_boots::report_repeated_boots;
pub use reports::LineTimes;
pub use spec::{Disk, DiskMode, Forward, VmSpec};
