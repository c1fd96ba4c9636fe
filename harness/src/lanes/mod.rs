//! The test lanes, ordered by cost: the first run on any machine in seconds, the last needs a cluster.

mod apiserver;
mod chart;
mod checks;
mod clusters;
mod conformance;
mod dependencies;
mod docker;
mod ginkgo;
mod go_tests;
mod image;
mod kernel;
mod libtest;
mod node;
mod power_cut;
mod sanity;
mod second_driver;
mod unit;
mod versions;

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;
use testvm::go_build;
use testvm::progress::seconds;
use testvm::report::{Outcome, Report};
use testvm::session::Session;

use crate::e2e;
use crate::node_options::KubernetesOptions;

/// Runs lanes in the order of their cost, and all of them even if one fails. Without --lane, it runs the lanes that CI
/// runs, which `cargo harness list` shows without a note, and only the quick specs of the conformance lane.
#[derive(Debug, clap::Args)]
pub struct TestArgs {
    /// Run only this lane; may be given more than once.
    #[arg(long = "lane", value_name = "LANE")]
    lanes: Vec<Lane>,
    /// In the kernel, the apiserver, the docker and the conformance lane, run only the tests whose names contain this,
    /// without power cuts; may be given more than once. Without --lane, the conformance lane then does not run.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// In the conformance lane, run only one spec of each suite and mode, and no slow one. Without --lane, this is the
    /// default.
    #[arg(long, conflicts_with = "only")]
    quick: bool,
    #[command(flatten)]
    e2e: e2e::Args,
}

impl TestArgs {
    /// Returns `true` if the lane runs. Without --lane, the lanes of CI run. A text that selects kernel tests selects no specs,
    /// so with --only the conformance lane runs only if --lane selects it.
    fn selects(&self, lane: Lane) -> bool {
        if self.lanes.is_empty() {
            lane.runs_in_ci() && (lane != Lane::Conformance || self.only.is_empty())
        } else {
            self.lanes.contains(&lane)
        }
    }

    /// Refuses options that no selected lane takes: a user would believe that they had an effect.
    fn refuse_unused(&self) -> Result<()> {
        let of_kubernetes = !self.e2e.kubernetes().words().is_empty();
        let options: [(&str, bool, &[Lane]); 5] = [
            ("--kubernetes and --kubernetes-bin", of_kubernetes, &WITH_KUBERNETES),
            ("--kernel", self.e2e.kernel().is_some(), &[Lane::Kernel, Lane::Sanity, Lane::E2e, Lane::Node]),
            (
                "--only",
                !self.only.is_empty(),
                &[Lane::Kernel, Lane::Apiserver, Lane::Docker, Lane::Conformance],
            ),
            ("--quick", self.quick, &[Lane::Conformance]),
            ("the options of e2e and its nodes", self.e2e.is_of_e2e_only(), &[Lane::E2e]),
        ];
        for (option, is_given, takers) in options {
            let names: Vec<&str> = takers.iter().map(|lane| lane.name()).collect();
            anyhow::ensure!(
                !is_given || takers.iter().any(|lane| self.selects(*lane)),
                "no selected lane takes {option}: add --lane {}, or leave them out",
                names.join(" or --lane ")
            );
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Lane {
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
    /// End-to-end tests with a real control plane and a real kubelet.
    E2e,
    /// The storage tests of Kubernetes (External.Storage) against the driver on a cluster. They are built from the Go module;
    /// csi/conformance has the definition of the driver for them. Runs all of them if --lane selects it.
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

/// The lanes that run programs of Kubernetes of the selected release. The lane versions runs all releases.
const WITH_KUBERNETES: [Lane; 7] = [
    Lane::Apiserver,
    Lane::E2e,
    Lane::Conformance,
    Lane::Node,
    Lane::Kind,
    Lane::Upgrade,
    Lane::SecondDriver,
];

const ALL: [Lane; 13] = [
    Lane::Unit,
    Lane::Apiserver,
    Lane::Kernel,
    Lane::Sanity,
    Lane::Docker,
    Lane::E2e,
    Lane::Conformance,
    Lane::Node,
    Lane::Versions,
    Lane::Kind,
    Lane::Upgrade,
    Lane::SecondDriver,
    Lane::Image,
];

/// Runs the selected lanes, and reports each as cases of suites with its name.
///
/// # Errors
/// A lane that cannot run is a failed case, not an error.
pub async fn run(session: &Session, args: TestArgs) -> Result<Report> {
    args.refuse_unused()?;
    let mut report = Report::new();
    for lane in ALL.iter().filter(|lane| args.selects(**lane)) {
        if session.cancel.is_cancelled() {
            report.push(lane.name(), "run the lane", Outcome::NotRun, Duration::ZERO);
            continue;
        }
        let started = Instant::now();
        let result = match lane {
            Lane::Unit => unit::run(session).await,
            Lane::Apiserver => apiserver::run(session, &args.e2e.kubernetes().source(), &args.only).await,
            Lane::Kernel => kernel::run(session, args.e2e.kernel(), &args.only).await,
            Lane::Sanity => sanity::run(session, args.e2e.kernel()).await,
            Lane::Docker => docker::run(session, &args.only).await,
            Lane::E2e => run_e2e(session, args.e2e.clone()).await,
            Lane::Node => node::run(session, args.e2e.kubernetes(), args.e2e.kernel()).await,
            Lane::Versions => versions::run(session).await,
            Lane::Kind => run_kind(session, args.e2e.kubernetes()).await,
            Lane::Upgrade => run_upgrade(session, args.e2e.kubernetes()).await,
            Lane::Conformance => {
                let selection = conformance::Selection::new(args.quick || args.lanes.is_empty(), &args.only);
                conformance::run(session, &args.e2e.kubernetes().source(), &selection).await
            }
            Lane::SecondDriver => second_driver::run(session, &args.e2e.kubernetes().source()).await,
            Lane::Image => image::run(session).await,
        };
        let cases = result.unwrap_or_else(|error| {
            let outcome = Outcome::Failed(format!("{error:#}"));
            let mut cases = Report::new();
            cases.push(lane.name(), "run the lane", outcome, started.elapsed());
            cases
        });
        // Failures are printed now, because the table at the end may be an hour away.
        let (summary, time) = (cases.summary(), seconds(started.elapsed()));
        session.progress.line(format!("lane {}: {summary} in {time}{}", lane.name(), cases.failures()));
        report.append(cases);
    }
    Ok(report)
}

/// Fetches and builds what only some lanes need.
pub(crate) async fn fetch(session: &Session) -> Result<()> {
    dependencies::CARGO_DENY.prepare(session).await?;
    go_build::build(session, &sanity::CSI_TEST).await.map(drop)
}

async fn run_e2e(session: &Session, args: e2e::Args) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run(session, args.with_self_check()).await
}

async fn run_kind(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_on_kind(session, &[], kubernetes, &session.workspace.reports("kind")).await
}

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

async fn run_upgrade(session: &Session, kubernetes: &KubernetesOptions) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_upgrade(session, kubernetes, &session.workspace.reports("upgrade")).await
}

impl Lane {
    fn name(self) -> &'static str {
        match self {
            Lane::Unit => "unit",
            Lane::Apiserver => "apiserver",
            Lane::Kernel => "kernel",
            Lane::Sanity => "sanity",
            Lane::Docker => "docker",
            Lane::E2e => "e2e",
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
    fn runs_in_ci(self) -> bool {
        !matches!(
            self,
            Lane::Node | Lane::Versions | Lane::Kind | Lane::Upgrade | Lane::SecondDriver | Lane::Image
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: TestArgs,
    }

    fn parse(line: &str) -> TestArgs {
        let words = std::iter::once("x").chain(line.split_whitespace());
        <Line as clap::Parser>::parse_from(words).args
    }

    fn refused(line: &str) -> Option<String> {
        parse(line).refuse_unused().err().map(|error| error.to_string())
    }

    #[test]
    fn options_that_no_selected_lane_takes_are_refused_with_the_lanes_that_do() {
        for (line, lane) in [
            ("--lane upgrade --kernel bookworm", "--lane node"),
            ("--lane second-driver --only claim", "--lane conformance"),
            ("--lane upgrade --quick", "--lane conformance"),
            ("--lane kernel --kubelet patched", "--lane e2e"),
            ("--lane conformance --story flow", "--lane e2e"),
            ("--lane node --keep", "--lane e2e"),
            ("--lane kernel --kubernetes 1.36", "--lane apiserver"),
            ("--lane versions --kubernetes 1.36", "--lane apiserver"),
        ] {
            let message = refused(line).unwrap_or_default();
            assert!(message.contains(lane), "{line}: {message}");
        }
    }

    #[test]
    fn options_of_a_selected_lane_are_taken() {
        for line in [
            "",
            "--kernel bookworm",
            "--only quota",
            "--lane conformance --quick",
            "--lane e2e --kubelet patched --story flow",
            "--lane node --kernel bookworm",
            "--lane upgrade --kubernetes 1.36",
        ] {
            assert_eq!(refused(line), None, "{line}");
        }
    }

    #[test]
    fn lanes_that_ci_does_not_run_have_to_be_named() {
        let selected = |line: &str| ALL.iter().filter(|lane| parse(line).selects(**lane)).count();
        for (line, expected) in
            [("", 7), ("--only quota", 6), ("--lane node", 1), ("--lane kind --lane unit", 2)]
        {
            assert_eq!(selected(line), expected, "{line}");
        }
        assert!(parse("--lane conformance --only claim").selects(Lane::Conformance));
    }
}
