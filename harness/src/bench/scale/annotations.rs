//! What claims with large annotations cost the provisioner of a node.
//!
//! No node is selected for the claims, so each provisioner that watches all claims keeps them. Any user who may create claims can do
//! the same.

use std::path::Path;

use anyhow::Result;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{Api, ResourceExt};
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::super::args::Args;
use super::super::cluster::{CLASS, NAMESPACE};
use super::super::measurement::{Environment, Samples};
use super::super::process;
use super::super::threshold::{Requirement, grows_at_most};
use super::claims::{self, create_numbered};
use super::process::Installation;
use crate::builds::{self, ProgramProfile};
use crate::fake_nodes::{self, NODES};
use crate::test_env::workload::create_namespace;

const RSS: &str = "annotations_rss_bytes";
const PEAK: &str = "annotations_peak_rss_bytes";

/// The API server allows 256 KiB for all annotations of an object.
const ANNOTATION_SIZE: usize = 250 << 10;

pub(super) async fn run(session: &Session, args: &Args, logs: &Path) -> Result<Environment> {
    let program = builds::driver_programs(session, ProgramProfile::Release).await?.provisioner;
    let kubernetes = KubernetesSource::default();
    let rounds = args.size(3, 1);
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let client = control_plane.client();
        create_namespace(client, NAMESPACE).await?;
        let installation = Installation::of_provisioner(program, client, kubeconfigs).await?;
        control_plane.stop_controller_manager().await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
        let (mut samples, mut existing) = (Samples::default(), 0);
        for count in [0, 1000] {
            let step =
                session.progress.step(format!("create claims with annotations until there are {count}"));
            create_numbered(existing..count, "claims", &step, |number| create(&claims, number)).await?;
            existing = count;
            step.done("");
            let step = session.progress.step(format!("measure the provisioner beside {count} claims"));
            for round in 1..=rounds {
                step.note(format!("round {round} of {rounds}"));
                let log = logs.join(format!("provisioner-{count}-{round}.log"));
                let provisioner = Box::pin(installation.start_provisioner(None, &log)).await?;
                samples.add(RSS, count, "B", provisioner.rss()? as f64);
                samples.add(PEAK, count, "B", provisioner.peak_rss()? as f64);
                provisioner.stop().await?;
            }
            step.done("");
        }
        Ok(samples)
    };
    let (nodes, profile) = (NODES.map(str::to_owned), ClusterProfile::Benchmark);
    let samples = fake_nodes::with_driver(session, &nodes, profile, &kubernetes, logs, measure).await?;
    process::environment("this machine, nodes without kubelets", &kubernetes, samples)
}

pub(super) fn requirements() -> Vec<Requirement> {
    vec![grows_at_most(
        "bytes of a provisioner's memory beside {n} claims with 250 KiB of annotations: at most 1.5 times those beside {peer_n}",
        RSS,
        1.5,
    )]
}

async fn create(claims: &Api<PersistentVolumeClaim>, number: u64) -> Result<()> {
    let name = format!("annotated-{number}");
    let mut claim = claims::claim(&name, CLASS)?;
    claim.annotations_mut().insert("example.com/notes".to_owned(), "n".repeat(ANNOTATION_SIZE));
    claims::create(claims, &claim).await?;
    claims::annotate_with_driver(claims, &name).await
}
