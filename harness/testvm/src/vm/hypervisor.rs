//! QEMU and its accelerator.

use std::fmt;

use crate::images::qemu::Qemu;

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Accelerator {
    Kvm,
    /// Emulation, which works on every host and is several times slower.
    Tcg,
}

impl Accelerator {
    pub(super) fn arguments(self) -> [&'static str; 4] {
        match self {
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accelerator::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }

    pub(super) fn parse(text: &str) -> Option<Accelerator> {
        match text.trim() {
            "kvm" => Some(Accelerator::Kvm),
            "tcg" => Some(Accelerator::Tcg),
            _ => None,
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        })
    }
}

/// The program that runs virtual machines on this host.
#[derive(Clone, Debug)]
pub struct Hypervisor {
    pub qemu: Qemu,
    pub accelerator: Accelerator,
}
