//! What claims with large annotations cost the provisioner of a node.
//!
//! No node is selected for the claims, so each provisioner that watches all claims keeps them. Any user who may create claims can do
//! the same.

use std::path::Path;

use anyhow::Result;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use serde_json::json;
use testvm::session::Session;
use testvm_cluster::{ControlPlane, objects};

use super::super::args::Args;
use super::super::cluster::{CLASS, NAMESPACE};
use super::super::measurement::{Environment, Samples};
use super::super::memory::{CURRENT, PEAK as PEAK_FIELD};
use super::super::peer;
use super::super::process::beside_control_plane;
use super::super::threshold::{Requirement, grows_at_most};
use super::claims::{self, create_numbered};
use super::process::{Installation, PLACE};
use crate::builds::{self, ProgramProfile};

const RSS: &str = "annotations_rss_bytes";
const PEAK: &str = "annotations_peak_rss_bytes";

const CLAIMS: u64 = 1000;

/// The KiB of annotations of each claim. The API server allows 256 KiB for all annotations of an object.
const KIB: [u64; 2] = [0, 250];

pub(super) async fn run(session: &Session, args: &Args, logs: &Path) -> Result<Environment> {
    let program = builds::driver_programs(session, ProgramProfile::Release).await?.provisioner;
    let driver = peer::memory_controller(session).await?;
    let rounds = args.size(3, 1);
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let client = control_plane.client();
        let installation = Installation::of_provisioner(program, driver, control_plane, kubeconfigs).await?;
        control_plane.stop_controller_manager().await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
        let step = session.progress.step(format!("create {CLAIMS} claims"));
        create_numbered(0..CLAIMS, "claims", &step, |number| create(&claims, number)).await?;
        step.done("");
        let mut samples = Samples::default();
        for kib in KIB {
            let step = session.progress.step(format!("write {kib} KiB of annotations to each"));
            create_numbered(0..CLAIMS, "claims", &step, |number| annotate(&claims, number, kib)).await?;
            step.done("");
            let step =
                session.progress.step(format!("measure the provisioner beside {kib} KiB in each claim"));
            for round in 1..=rounds {
                step.note(format!("round {round} of {rounds}"));
                let log = logs.join(format!("provisioner-{kib}-{round}.log"));
                let provisioner = Box::pin(installation.start_provisioner(None, &log)).await?;
                samples.add(RSS, kib, "B", provisioner.memory(CURRENT)?);
                samples.add(PEAK, kib, "B", provisioner.memory(PEAK_FIELD)?);
                provisioner.stop().await?;
            }
            step.done("");
        }
        Ok(samples)
    };
    beside_control_plane(session, logs, PLACE, measure).await
}

pub(super) fn requirements() -> Vec<Requirement> {
    vec![
        grows_at_most(
            "bytes of a provisioner's memory beside 1,000 claims with {n} KiB of annotations: at most 1.5 times those with {peer_n} KiB",
            RSS,
            1.5,
        ),
        grows_at_most(
            "bytes that it takes at most, with {n} KiB: at most 2 times those with {peer_n} KiB",
            PEAK,
            2.0,
        ),
    ]
}

async fn create(claims: &Api<PersistentVolumeClaim>, number: u64) -> Result<()> {
    let name = name(number);
    claims::create(claims, &claims::claim(&name, CLASS)?).await?;
    claims::annotate_with_driver(claims, &name).await
}

async fn annotate(claims: &Api<PersistentVolumeClaim>, number: u64, kib: u64) -> Result<()> {
    let notes = "n".repeat(usize::try_from(kib << 10)?);
    let patch = json!({"metadata": {"annotations": {"example.com/notes": notes}}});
    objects::patch(claims, &name(number), &patch).await.map(drop)
}

fn name(number: u64) -> String {
    format!("annotated-{number}")
}
