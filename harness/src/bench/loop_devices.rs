//! `bench loop`: loop devices and project ids, compared with the bare system calls and the methods of other
//! programs.

use anyhow::Result;
use testvm::rust_build;
use testvm::session::Session;

use super::measurement::Measurements;
use super::outcome::{Args, Outcome};
use super::plot::Plot;
use super::threshold::{self, Threshold};
use super::{guest, here};

const PLOTS: [Plot; 5] = [
    Plot::new(
        "Attach",
        "devices attached",
        &["floor_attach", "attach_pool", "attach_get_free", "losetup_attach"],
    ),
    Plot::new("Find the device of a file", "devices attached", &["find_device", "losetup_j"]),
    Plot::new("Detach", "devices attached", &["floor_detach", "detach", "losetup_detach"]),
    Plot::new(
        "Write 8 MiB without fsync, and detach",
        "devices attached",
        &["write_and_detach", "write_and_losetup_detach"],
    ),
    Plot::new("Allocate a project id", "ids in use", &["id_alloc", "id_gap_scan"]),
];

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "loopfs", "loop")).await?;
    let mut parts = Vec::new();
    let mut in_guest = Vec::new();
    if here::has_loop_devices() {
        let directory = here::files(session, args)?;
        let args = args.of_program(&["devices", &directory.display().to_string()]);
        parts.push(here::run(session, &program, args, &[]).await?);
    } else {
        session
            .progress
            .line("this user or machine has no loop devices: they are measured in the virtual machine");
        in_guest.push(args.of_program(&["devices", guest::XFS]));
    }
    in_guest.push(args.of_program(&["ids", guest::XFS]));
    parts.extend(
        guest::run(session, args.kernel.as_deref(), &program, Vec::new(), &in_guest, guest::DISK_MIB).await?,
    );
    Ok(Outcome::new(parts, thresholds, &PLOTS))
}

/// Returns the thresholds for every count that was measured.
fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    for n in all.counts("attach_pool") {
        // The calls that an attachment with read-back cannot omit take 1.16 to 1.20 times as long as the bare
        // two calls.
        let text = format!("attach, warm pool, {n} attached: within 1.3 times the bare calls");
        thresholds.push(threshold::at_most(all, &text, ("attach_pool", n), 1.3, ("floor_attach", n)));
    }
    thresholds.push(threshold::flat(all, "attach, warm pool: flat within 1.3 times", "attach_pool", 1.3));
    let most = all.counts("attach_pool").last().copied().unwrap_or_default();
    let text = format!("the device of a file, {most} attached: 1000 times as fast as losetup -j");
    thresholds.push(threshold::faster(all, &text, ("find_device", most), 1000.0, ("losetup_j", most)));
    thresholds.push(threshold::flat(
        all,
        "the device of a file: constant within 1.5 times",
        "find_device",
        1.5,
    ));
    for n in all.counts("detach") {
        let text = format!("detach, {n} attached: under twice the bare calls");
        thresholds.push(threshold::at_most(all, &text, ("detach", n), 2.0, ("floor_detach", n)));
    }
    for n in all.counts("write_and_losetup_detach") {
        let text = format!("write 8 MiB and detach, {n} attached: within 1.1 times losetup");
        let (ours, peer) = (("write_and_detach", n), ("write_and_losetup_detach", n));
        thresholds.push(threshold::at_most(all, &text, ours, 1.1, peer));
    }
    let text =
        format!("{most} devices detached and removed in the background: 20 times as fast as one by one");
    thresholds.push(threshold::faster(
        all,
        &text,
        ("remove_background", most),
        20.0,
        ("remove_serial", most),
    ));
    thresholds.push(threshold::flat(all, "project id allocation: flat within 1.5 times", "id_alloc", 1.5));
    thresholds
}
