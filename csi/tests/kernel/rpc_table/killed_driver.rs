//! Calls during which the driver is killed.

use nix::sys::signal::Signal;

use super::{CallResult, Rpc, Subject};
use crate::calls_in_progress::{lock_image, until_free, wait_until_busy};
use crate::driver_process::Process;
use crate::fixture::Fixture;

/// Starts all calls concurrently, and kills the driver when half of them have returned and two are in progress. Returns the
/// result of each call.
pub(super) fn kill_during_calls(
    fixture: &Fixture,
    driver: Process,
    rpcs: &[Rpc],
    subjects: &[Subject],
) -> Vec<CallResult> {
    let node = driver.connect();
    let locked: Vec<&Subject> = std::iter::zip(rpcs, subjects)
        .filter(|(rpc, _)| ["NodeStageVolume", "NodePublishVolume"].contains(&rpc.name))
        .map(|(_, subject)| subject)
        .collect();
    let locks: Vec<_> = locked.iter().map(|subject| lock_image(fixture, &subject.name)).collect();
    let (returned, results) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let calls: Vec<_> = std::iter::zip(rpcs, subjects)
            .map(|(rpc, subject)| {
                let (node, returned) = (&node, returned.clone());
                scope.spawn(move || {
                    let result = until_free(|| (rpc.call)(node, subject));
                    returned.send(()).unwrap();
                    result
                })
            })
            .collect();
        for subject in locked {
            wait_until_busy(&node, &subject.name, &subject.target);
        }
        results.iter().take(rpcs.len() / 2).for_each(drop);
        driver.signal(Signal::SIGKILL);
        drop(locks);
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}
