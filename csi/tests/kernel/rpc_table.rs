//! Test of every RPC in five situations: called once, repeated, called concurrently, called with malformed names and
//! paths, and called while the driver is killed. The results are printed as a table to the log.

use std::path::PathBuf;

use tonic::{Code, Status};

use crate::driver_process::Process;
use crate::fixture::{Fixture, write_log};
use crate::support::*;

mod killed_driver;
mod malformed_names;
mod rpcs;

use killed_driver::kill_during_calls;
use malformed_names::{Outside, with_malformed_names};
use rpcs::RPCS;

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

struct Rpc {
    name: &'static str,
    /// Creates the state that the call changes or reads.
    prepare: fn(&Fixture, &Client, &Subject),
    call: fn(&Client, &Subject) -> CallResult,
    /// Returns `true` if the node is in the state that the call establishes.
    is_done: fn(&Fixture, &Subject) -> bool,
    malformed_name: MalformedName,
}

/// The expected result of a call with a malformed name.
#[derive(Clone, Copy, Eq, PartialEq)]
enum MalformedName {
    /// The request contains no name.
    TakesNoName,
    Refused,
    /// No object can have this name, so deleting it succeeds and lists are empty.
    CountsAsDeleted,
    /// The name of a new object may be any text.
    Accepted,
}

/// Unpublishes and unstages the volume.
fn clean_up(node: &Client, subject: &Subject) {
    node.node_unpublish_volume(unpublish(&subject.name, &subject.target)).unwrap();
    node.node_unstage_volume(unstage(&subject.name, &subject.staging)).unwrap();
}

fn once_and_repeated(fixture: &Fixture, node: &Client, number: usize, rpc: &Rpc) -> [String; 2] {
    let subject = Subject::new(fixture, &format!("once-{number}"));
    (rpc.prepare)(fixture, node, &subject);
    let first = (rpc.call)(node, &subject).unwrap_or_else(|status| panic!("{}: {status:?}", rpc.name));
    assert!((rpc.is_done)(fixture, &subject), "{}, called once", rpc.name);
    let repeated =
        (rpc.call)(node, &subject).unwrap_or_else(|status| panic!("{}, repeated: {status:?}", rpc.name));
    assert_eq!(repeated, first, "{}, repeated", rpc.name);
    assert!((rpc.is_done)(fixture, &subject), "{}, repeated", rpc.name);
    clean_up(node, &subject);
    ["OK".to_owned(), "the same".to_owned()]
}

fn concurrently(fixture: &Fixture, node: &Client, number: usize, rpc: &Rpc) -> String {
    let subject = Subject::new(fixture, &format!("concurrent-{number}"));
    (rpc.prepare)(fixture, node, &subject);
    let results: Vec<CallResult> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| (rpc.call)(node, &subject))).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    for status in results.iter().filter_map(|result| result.as_ref().err()) {
        assert_eq!(status.code(), Code::Aborted, "{}, called concurrently: {status:?}", rpc.name);
    }
    let done = results.iter().filter(|result| result.is_ok()).count();
    assert!(done > 0, "{}, called concurrently: no call succeeds", rpc.name);
    assert!((rpc.is_done)(fixture, &subject), "{}, called concurrently", rpc.name);
    clean_up(node, &subject);
    format!("{done} OK, {} Aborted", results.len() - done)
}

/// The calls are repeated, made concurrently and interrupted by the end of the driver.
#[test]
fn every_rpc_can_be_repeated_safely() {
    let fixture = Fixture::without_driver();
    let driver = Process::start(&fixture.directories);
    let node = driver.connect();
    node.wait_until_ready();
    let outside = Outside::create(&fixture);
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (number, rpc) in RPCS.iter().enumerate() {
        let mut row = vec![rpc.name.to_owned()];
        row.extend(once_and_repeated(&fixture, &node, number, rpc));
        row.push(concurrently(&fixture, &node, number, rpc));
        row.push(with_malformed_names(&fixture, &node, &outside, number, rpc));
        rows.push(row);
    }

    let subjects: Vec<Subject> =
        (0..RPCS.len()).map(|number| Subject::new(&fixture, &format!("killed-{number}"))).collect();
    for (rpc, subject) in std::iter::zip(RPCS, &subjects) {
        (rpc.prepare)(&fixture, &node, subject);
    }
    drop(node);
    let interrupted = kill_during_calls(&fixture, driver, &subjects);
    assert!(
        interrupted.iter().filter(|result| result.is_err()).count() >= 2,
        "no call was interrupted: {interrupted:?}"
    );
    let driver = Process::start(&fixture.directories);
    let node = driver.connect();
    node.wait_until_ready();
    for (((rpc, subject), interrupted), row) in
        std::iter::zip(RPCS, &subjects).zip(interrupted).zip(&mut rows)
    {
        let result = (rpc.call)(&node, subject);
        assert!(
            result.is_ok(),
            "{}, repeated after {interrupted:?} of a killed driver: {result:?}",
            rpc.name
        );
        assert!((rpc.is_done)(&fixture, subject), "{}, repeated after the driver was killed", rpc.name);
        row.push(if interrupted.is_ok() { "returned, OK" } else { "interrupted, OK" }.to_owned());
        clean_up(&node, subject);
    }
    driver.stop(node);
    outside.remove();
    write_log(&format!(
        "{:<28} {:<4} {:<9} {:<16} {:<15} malformed",
        "RPC", "once", "repeated", "concurrently", "killed"
    ));
    for row in rows {
        let [name, first, repeated, concurrent, malformed, killed] = &row[..] else { panic!("{row:?}") };
        write_log(&format!("{name:<28} {first:<4} {repeated:<9} {concurrent:<16} {killed:<15} {malformed}"));
    }
    fixture.finish();
}
