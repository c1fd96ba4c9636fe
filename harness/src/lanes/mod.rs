//! The test lanes, ordered by cost: the first run on any machine in seconds, the last needs a cluster.

mod apiserver;
mod clusters;
mod conformance;
mod docker;
mod ginkgo;
mod go_tests;
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
use testvm::progress::seconds;
use testvm::report::{Outcome, Report};
use testvm::session::Session;

use crate::e2e;
use crate::node_options::KubernetesOptions;

/// Runs lanes in the order of their cost, and all of them even if one fails. Without --lane, it runs all but the
/// lanes node, versions, kind, upgrade, conformance and second-driver.
#[derive(Debug, clap::Args)]
pub struct TestArgs {
    /// Run only this lane; may be given more than once.
    #[arg(long = "lane", value_name = "LANE")]
    lanes: Vec<Lane>,
    /// In the kernel, the apiserver, the docker and the conformance lane, run only the tests whose names contain this,
    /// without power cuts; may be given more than once.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// In the conformance lane, run only one spec of each suite and mode.
    #[arg(long, conflicts_with = "only")]
    quick: bool,
    #[command(flatten)]
    e2e: e2e::Args,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Lane {
    /// Format, lints, unit tests, dependency rules, documentation: no root, no virtual machine.
    Unit,
    /// The provisioner against a real API server, controller manager and scheduler, without a kubelet; no root, no
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
    /// The storage tests of Kubernetes (External.Storage) against the driver on a cluster. They are built from the Go module;
    /// csi/conformance has the definition of the driver for them. Runs only if --lane selects it.
    Conformance,
    /// Another driver, local-path-provisioner, on a cluster of the harness. It is built from its Go module. The checks of the
    /// capacity must fail for it. Runs only if --lane selects it.
    SecondDriver,
}

const ALL: [Lane; 12] = [
    Lane::Unit,
    Lane::Apiserver,
    Lane::Kernel,
    Lane::Sanity,
    Lane::Docker,
    Lane::E2e,
    Lane::Node,
    Lane::Versions,
    Lane::Kind,
    Lane::Upgrade,
    Lane::Conformance,
    Lane::SecondDriver,
];

/// Runs the selected lanes, and reports each as cases of suites with its name.
///
/// # Errors
/// A lane that cannot run is a failed case, not an error.
pub async fn run(session: &Session, args: TestArgs) -> Result<Report> {
    let selected = |lane: &Lane| lane.is_selected(&args.lanes);
    anyhow::ensure!(
        args.e2e.kernel().is_none() || ALL.iter().any(|lane| selected(lane) && lane.takes_kernel()),
        "no selected lane takes --kernel: add --lane kernel, sanity, e2e or node, or leave --kernel out"
    );
    let mut report = Report::new();
    for lane in ALL.iter().filter(|lane| selected(lane)) {
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
                let selection = conformance::Selection::new(args.quick, &args.only);
                conformance::run(session, &args.e2e.kubernetes().source(), &selection).await
            }
            Lane::SecondDriver => second_driver::run(session, &args.e2e.kubernetes().source()).await,
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
        let named = if lane.is_selected(&[]) { "" } else { " (only if it is named)" };
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
        }
    }

    /// Returns `true` if `--kernel` selects the kernel of the lane.
    fn takes_kernel(self) -> bool {
        matches!(self, Lane::Kernel | Lane::Sanity | Lane::E2e | Lane::Node)
    }

    /// Returns `true` if the lane runs: without names, those that CI runs.
    fn is_selected(self, names: &[Lane]) -> bool {
        if names.is_empty() {
            !matches!(
                self,
                Lane::Node
                    | Lane::Versions
                    | Lane::Kind
                    | Lane::Upgrade
                    | Lane::Conformance
                    | Lane::SecondDriver
            )
        } else {
            names.contains(&self)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lanes_run_only_if_they_are_named() {
        let selected = |names: &[Lane]| ALL.iter().filter(|lane| lane.is_selected(names)).count();
        assert_eq!((selected(&[]), selected(&[Lane::Node])), (6, 1));
        let named =
            [Lane::Node, Lane::Versions, Lane::Kind, Lane::Upgrade, Lane::Conformance, Lane::SecondDriver];
        assert!(named.iter().all(|lane| !lane.is_selected(&[]) && lane.is_selected(&named)));
    }
}
