//! The lanes, ordered by cost.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub(super) enum Lane {
    /// Format, lints, unit tests, dependencies, documentation: no root, no virtual machine.
    Unit,
    /// The provisioner and the Helm chart against a real API server, controller manager and scheduler, without kubelet, root or
    /// virtual machine.
    Apiserver,
    /// Tests of the kernel interface, as root on real kernels with XFS project quotas, in QEMU. Also power
    /// cuts, after which the tests look for lost data and leaks.
    Kernel,
    /// The conformance suite of the Container Storage Interface against the driver on a real kernel, in QEMU.
    Sanity,
    /// The driver's image in a Docker engine, in QEMU: its service, the containers in which it refuses to start, and its end.
    Docker,
    /// End-to-end tests with a real control plane and a real kubelet, without the stories of the lane long-stories.
    E2e,
    /// The stories that take longest: power cut, helm and claim labels. Runs only if --lane selects it.
    LongStories,
    /// The stories with programs of other projects: gVisor, snapshot-controller and csi-snapshotter. Runs only if --lane selects
    /// it.
    OtherProjects,
    /// Each fault of `cargo harness e2e --break` on a cluster. Each run must fail and name its fault. Runs only if --lane
    /// selects it.
    SelfCheck,
    /// All tests of the lane kernel on each kernel. Runs only if --lane selects it.
    Kernels,
    /// The storage tests of Kubernetes (External.Storage) against the driver on a cluster. They are built from the Go module;
    /// csi/conformance has the definition of the driver for them. Runs only if --lane selects it.
    Conformance,
    /// The stories that depend on the node, on six kinds of nodes. They have a stock or a patched kubelet with the losetup
    /// of util-linux or of loopfs, a patched kubelet without mount, umount and losetup, or a kubelet with its directory on
    /// the data disk. Runs only if --lane selects it.
    Node,
    /// The stories that depend on the node, on each minor release of Kubernetes and on nodes with each kernel. Runs only if --lane selects it.
    Versions,
    /// The driver on a cluster of kind, as the README installs it, in a virtual machine with Docker. Runs only if --lane
    /// selects it.
    Kind,
    /// An earlier version of the driver is replaced by this one and back, while volumes are in use and incomplete. Runs only if
    /// --lane selects it.
    Upgrade,
    /// Another driver, local-path-provisioner, on a cluster of the harness. It is built from its Go module. The checks of the
    /// capacity must fail for it. Runs only if --lane selects it.
    SecondDriver,
    /// The image for a registry, built from two copies of this checkout. Both must give the same bytes, and the programs must
    /// start on each platform. Runs only if --lane selects it.
    Image,
}

pub(super) const ALL: [Lane; 17] = [
    Lane::Unit,
    Lane::Apiserver,
    Lane::Kernel,
    Lane::Sanity,
    Lane::Docker,
    Lane::E2e,
    Lane::LongStories,
    Lane::OtherProjects,
    Lane::SelfCheck,
    Lane::Kernels,
    Lane::Conformance,
    Lane::Node,
    Lane::Versions,
    Lane::Kind,
    Lane::Upgrade,
    Lane::SecondDriver,
    Lane::Image,
];

/// Returns the name of each lane, and the first sentence about it.
pub(crate) fn descriptions() -> impl Iterator<Item = (&'static str, String)> {
    ALL.into_iter().map(|lane| {
        let help = lane.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
        let help = help.unwrap_or_default();
        let sentence = help.split(". ").next().unwrap_or_default().trim_end_matches('.');
        let named = if lane.runs_in_ci() { "" } else { " (only if it is named)" };
        (lane.name(), format!("{sentence}{named}"))
    })
}

impl Lane {
    pub(super) fn name(self) -> &'static str {
        match self {
            Lane::Unit => "unit",
            Lane::Apiserver => "apiserver",
            Lane::Kernel => "kernel",
            Lane::Sanity => "sanity",
            Lane::Docker => "docker",
            Lane::E2e => "e2e",
            Lane::LongStories => "long-stories",
            Lane::OtherProjects => "other-projects",
            Lane::SelfCheck => "self-check",
            Lane::Kernels => "kernels",
            Lane::Node => "node",
            Lane::Versions => "versions",
            Lane::Kind => "kind",
            Lane::Upgrade => "upgrade",
            Lane::Conformance => "conformance",
            Lane::SecondDriver => "second-driver",
            Lane::Image => "image",
        }
    }

    /// Returns `true` if the lane runs in CI. The others take long, or changes of loopfs do not affect their result. They run
    /// only if --lane selects them.
    pub(super) fn runs_in_ci(self) -> bool {
        matches!(self, Lane::Unit | Lane::Apiserver | Lane::Kernel | Lane::Sanity | Lane::Docker | Lane::E2e)
    }
}
