//! Runs the stories that depend on the node on several clusters, one after the other.

use std::time::Instant;

use anyhow::Result;
use testvm::progress::seconds;
use testvm::report::Report;
use testvm::session::Session;

use super::passes::require_pass;
use crate::e2e;
use crate::node_options::{KubernetesOptions, NodeOptions};

/// A cluster of a lane. Its name can be the name of a directory.
pub(super) struct LaneCluster {
    pub(super) name: String,
    pub(super) kubernetes: KubernetesOptions,
    pub(super) nodes: NodeOptions,
}

/// Runs the stories on every cluster. All run even if one fails. The logs of each are in a directory of its own in the
/// reports of `lane`.
pub(super) async fn run(session: &Session, lane: &str, clusters: Vec<LaneCluster>) -> Result<Report> {
    let _lock = session.exclusive("e2e").await?;
    let mut report = Report::new();
    for LaneCluster { name, kubernetes, nodes } in clusters {
        let started = Instant::now();
        let directory = session.workspace.reports(lane).join(&name);
        let cases = e2e::run_on_nodes(session, nodes, &kubernetes, &directory).await?;
        let mut cases = require_pass("e2e", cases);
        for case in &mut cases.cases {
            case.suite = format!("{name}: {}", case.suite);
        }
        let (summary, time) = (cases.summary(), seconds(started.elapsed()));
        session.progress.line(format!("cluster {name}: {summary} in {time}{}", cases.failures()));
        report.append(cases);
    }
    Ok(report)
}
