//! Test of every RPC in four situations: called once, repeated, called concurrently, and called while the driver is killed. The unit
//! tests of requests have malformed names and paths.

use std::path::PathBuf;

use tonic::{Code, Status};

use crate::driver_process::Process;
use crate::fixture::Fixture;
use crate::support::*;

mod killed_driver;
mod rpcs;

use killed_driver::kill_during_calls;
use rpcs::rpcs;

/// The volume, snapshot and paths of one call.
#[derive(Clone)]
struct Subject {
    /// The name and id of its volume, and of its snapshot.
    name: String,
    target: PathBuf,
    staging: PathBuf,
}

impl Subject {
    fn new(fixture: &Fixture, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            target: fixture.target(name),
            staging: fixture.target(&format!("{name}-staging")),
        }
    }
}

/// The result of a call. It contains only the parts that are equal for repeated calls.
type CallResult = Result<String, Status>;

type Call = dyn Fn(&Client, &Subject) -> CallResult + Sync;

struct Rpc {
    name: &'static str,
    /// Creates the state that the call changes or reads.
    prepare: fn(&Fixture, &Client, &Subject),
    /// Returns `true` if the node is in the state that the call establishes.
    is_done: fn(&Fixture, &Subject) -> bool,
    call: Box<Call>,
}

/// Unpublishes and unstages the volume.
fn clean_up(node: &Client, subject: &Subject) {
    node.node_unpublish_volume(unpublish(&subject.name, &subject.target)).unwrap();
    node.node_unstage_volume(unstage(&subject.name, &subject.staging)).unwrap();
}

fn call_repeatedly(fixture: &Fixture, node: &Client, number: usize, rpc: &Rpc) {
    let subject = Subject::new(fixture, &format!("once-{number}"));
    (rpc.prepare)(fixture, node, &subject);
    let first = (rpc.call)(node, &subject).unwrap_or_else(|status| panic!("{}: {status:?}", rpc.name));
    assert!((rpc.is_done)(fixture, &subject), "{}, called once", rpc.name);
    let repeated =
        (rpc.call)(node, &subject).unwrap_or_else(|status| panic!("{}, repeated: {status:?}", rpc.name));
    assert_eq!(repeated, first, "{}, repeated", rpc.name);
    assert!((rpc.is_done)(fixture, &subject), "{}, repeated", rpc.name);
    clean_up(node, &subject);
}

fn call_concurrently(fixture: &Fixture, node: &Client, number: usize, rpc: &Rpc) {
    let subject = Subject::new(fixture, &format!("concurrent-{number}"));
    (rpc.prepare)(fixture, node, &subject);
    let results: Vec<CallResult> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8).map(|_| scope.spawn(|| (rpc.call)(node, &subject))).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    for status in results.iter().filter_map(|result| result.as_ref().err()) {
        assert_eq!(status.code(), Code::Aborted, "{}, called concurrently: {status:?}", rpc.name);
    }
    assert!(results.iter().any(Result::is_ok), "{}, called concurrently: no call succeeds", rpc.name);
    assert!((rpc.is_done)(fixture, &subject), "{}, called concurrently", rpc.name);
    clean_up(node, &subject);
}

/// The calls are repeated, made concurrently and interrupted by the end of the driver.
#[test]
fn every_rpc_can_be_repeated_safely() {
    let fixture = Fixture::without_driver();
    let (driver, node) = Process::start_ready(&fixture.directories);
    let rpcs = rpcs();
    for (number, rpc) in rpcs.iter().enumerate() {
        call_repeatedly(&fixture, &node, number, rpc);
        call_concurrently(&fixture, &node, number, rpc);
    }

    let subjects: Vec<Subject> =
        (0..rpcs.len()).map(|number| Subject::new(&fixture, &format!("killed-{number}"))).collect();
    for (rpc, subject) in std::iter::zip(&rpcs, &subjects) {
        (rpc.prepare)(&fixture, &node, subject);
    }
    drop(node);
    let interrupted = kill_during_calls(&fixture, driver, &rpcs, &subjects);
    assert!(
        interrupted.iter().filter(|result| result.is_err()).count() >= 2,
        "no call was interrupted: {interrupted:?}"
    );
    let (driver, node) = Process::start_ready(&fixture.directories);
    for ((rpc, subject), interrupted) in std::iter::zip(&rpcs, &subjects).zip(interrupted) {
        if interrupted.is_ok() {
            assert!((rpc.is_done)(&fixture, subject), "{}, returned before the driver was killed", rpc.name);
        }
        let result = (rpc.call)(&node, subject);
        assert!(
            result.is_ok(),
            "{}, repeated after {interrupted:?} of a killed driver: {result:?}",
            rpc.name
        );
        assert!((rpc.is_done)(&fixture, subject), "{}, repeated after the driver was killed", rpc.name);
        clean_up(&node, subject);
    }
    driver.stop(node);
    fixture.finish();
}
