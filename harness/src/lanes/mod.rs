//! The test lanes, ordered by cost: the first run on any machine in seconds, the last needs a cluster.

mod apiserver;
mod conformance;
mod docker;
mod ginkgo;
mod go_tests;
mod kernel;
mod libtest;
mod node;
mod power_cut;
mod sanity;
mod unit;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use testvm::progress::seconds;
use testvm::report::{Outcome, Report};
use testvm::session::Session;

use crate::e2e;

/// Runs lanes in the order of their cost, and all of them even if one fails. Without --lane, it runs all but the
/// lanes node, kind and conformance.
#[derive(Debug, clap::Args)]
pub struct TestArgs {
    /// Run only this lane; may be given more than once.
    #[arg(long = "lane", value_name = "LANE")]
    lanes: Vec<Lane>,
    /// Boot this kernel of vm-images/kernels/kernels.toml: instead of all kernels in the kernel lane, and
    /// instead of the default in the sanity lane.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// In the kernel, the apiserver, the docker and the conformance lane, run only the tests whose names contain this, without
    /// power cuts; may be given more than once.
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
    /// The driver's image in a Docker engine, in QEMU: what it serves, what it refuses, how it ends.
    Docker,
    /// End-to-end tests with a real control plane and a real kubelet.
    E2e,
    /// The same on other nodes, one cluster after the other: a stock or a patched kubelet with the losetup of
    /// util-linux or of loopfs, a patched kubelet without mount, umount and losetup, and a kubelet with its directory on
    /// the data disk. Runs only if --lane selects it.
    Node,
    /// The driver on a cluster of kind, as the README installs it, in a virtual machine with Docker. Runs only if --lane
    /// selects it.
    Kind,
    /// The storage tests of Kubernetes (External.Storage) against the driver on a cluster, by the definition in
    /// csi/conformance. It builds them from the Go module. Runs only if --lane selects it.
    Conformance,
}

const ALL: [Lane; 9] = [
    Lane::Unit,
    Lane::Apiserver,
    Lane::Kernel,
    Lane::Sanity,
    Lane::Docker,
    Lane::E2e,
    Lane::Node,
    Lane::Kind,
    Lane::Conformance,
];

/// Runs the selected lanes, and reports each as cases of suites with its name.
///
/// # Errors
/// A lane that cannot run is a failed case, not an error.
pub async fn run(session: &Session, args: TestArgs) -> Result<Report> {
    let selected = |lane: &Lane| lane.is_selected(&args.lanes);
    let mut report = Report::new();
    for lane in ALL.iter().filter(|lane| selected(lane)) {
        if session.cancel.is_cancelled() {
            report.push(lane.name(), "run the lane", Outcome::NotRun, Duration::ZERO);
            continue;
        }
        let started = Instant::now();
        let result = match lane {
            Lane::Unit => unit::run(session).await,
            Lane::Apiserver => apiserver::run(session, args.e2e.kubernetes_bin(), &args.only).await,
            Lane::Kernel => kernel::run(session, args.kernel.as_deref(), &args.only).await,
            Lane::Sanity => sanity::run(session, args.kernel.as_deref()).await,
            Lane::Docker => docker::run(session, &args.only).await,
            Lane::E2e => run_e2e(session, args.e2e.clone()).await,
            Lane::Node => node::run(session, args.e2e.kubernetes_bin()).await,
            Lane::Kind => run_kind(session, args.e2e.kubernetes_bin()).await,
            Lane::Conformance => {
                let selection = conformance::Selection::new(args.quick, &args.only);
                conformance::run(session, args.e2e.kubernetes_bin(), &selection).await
            }
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

async fn run_kind(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    e2e::run_on_kind(session, &[], kubernetes_bin, &session.workspace.reports("kind")).await
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
            Lane::Kind => "kind",
            Lane::Conformance => "conformance",
        }
    }

    /// Returns `true` if the lane runs: without names, those that CI runs.
    fn is_selected(self, names: &[Lane]) -> bool {
        if names.is_empty() {
            !matches!(self, Lane::Node | Lane::Kind | Lane::Conformance)
        } else {
            names.contains(&self)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lanes_node_kind_and_conformance_run_only_if_they_are_named() {
        let selected = |names: &[Lane]| ALL.iter().filter(|lane| lane.is_selected(names)).count();
        assert_eq!((selected(&[]), selected(&[Lane::Node])), (6, 1));
        let named = [Lane::Node, Lane::Kind, Lane::Conformance];
        assert!(named.iter().all(|lane| !lane.is_selected(&[]) && lane.is_selected(&named)));
    }
}
