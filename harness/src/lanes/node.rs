//! The node lane: claims and pods on nodes with another kubelet, another losetup, without tools, or with the kubelet's
//! directory on the data disk.
//!
//! Each run has a cluster of its own, and the scenarios that depend on the node.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use testvm::progress::seconds;
use testvm::report::Report;
use testvm::session::Session;

use crate::e2e;
use crate::node_options::NodeOptions;

/// Runs the scenarios on every combination. All run even if one fails.
pub(super) async fn run(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    let mut report = Report::new();
    for (name, nodes) in NodeOptions::combinations() {
        let started = Instant::now();
        let directory = session.workspace.reports("node").join(name);
        let mut cases = e2e::run_on_nodes(session, nodes, kubernetes_bin, &directory).await?;
        for case in &mut cases.cases {
            case.suite = format!("{name}: {}", case.suite);
        }
        let (summary, time) = (cases.summary(), seconds(started.elapsed()));
        session.progress.line(format!("nodes {name}: {summary} in {time}{}", cases.failures()));
        report.append(cases);
    }
    Ok(report)
}
