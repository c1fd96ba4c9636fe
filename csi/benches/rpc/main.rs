//! Measures the node's calls of CSI through the socket of the driver's program, with few volumes on the node and with many. Run
//! by `cargo harness bench rpc`, which makes a table of what this prints: one JSON object in a line, the machine first.
//!
//! ```console
//! # cargo bench -p csi --features bench --bench rpc -- /mnt/xfs-with-prjquota target/release/loopfs-csi
//! ```
//!
//! The file system must be disposable: it must contain no volumes.

mod calls;
mod driver;
#[path = "../../../loopfs/benches/loop/machine.rs"]
mod machine;
#[path = "../../../loopfs/benches/loop/samples.rs"]
mod samples;
#[path = "../../tests/support/mod.rs"]
mod support;
mod volume;

use std::path::Path;
use std::process::ExitCode;

use calls::Calls;
use driver::Process;
use support::{Client, Directories};
use volume::{KINDS, Volume};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// The length of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// The numbers of published volumes that are compared, with the measured ones.
    few: usize,
    many: usize,
    /// The measured calls of each kind with each number of volumes.
    rounds: usize,
}

const FULL: Scale = Scale { few: 10, many: 1000, rounds: 200 };
const QUICK: Scale = Scale { few: 10, many: 100, rounds: 20 };

/// The number of volumes between two progress lines.
const REPORT_INTERVAL: usize = 50;

fn main() -> ExitCode {
    // Cargo itself adds the first of these arguments.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let scale = if args.iter().any(|arg| arg == "--quick") { QUICK } else { FULL };
    let words: Vec<&str> = args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--")).collect();
    let result = match words[..] {
        [directory, program] => run(Path::new(directory), Path::new(program), scale),
        _ => Err("give the DIRECTORY and the PROGRAM of the driver, and --quick for a short run".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(directory: &Path, program: &Path, scale: Scale) -> Result<()> {
    machine::print(directory)?;
    let scratch = tempfile::tempdir()?;
    let directories = Directories::create(scratch.path(), directory);
    let driver = Process::start(program, &directories)?;
    let client = Client::connect(&directories.endpoint);
    client.wait_until_ready();
    let measured = measure(&client, &directories, scale);
    // The connection is closed first, because the driver would wait for an idle one.
    drop(client);
    driver.stop()?;
    measured
}

fn measure(client: &Client, directories: &Directories, scale: Scale) -> Result<()> {
    let mut measured = Vec::new();
    for kind in KINDS {
        let volume = Volume::create(client, directories, &format!("measured-{kind}"), kind)?;
        measured.push((volume, Calls::new(kind, scale.few), Calls::new(kind, scale.many)));
    }
    let mut others = Vec::new();
    // Half of the rounds with few volumes come before the others, and half after them, so that other load of the machine which
    // changes slowly affects both numbers alike.
    let half = scale.rounds / 2;
    for (count, rounds) in [(scale.few, half), (scale.many, scale.rounds), (scale.few, half)] {
        populate(client, directories, &mut others, count - measured.len())?;
        // Round 0 fills the caches.
        for round in 0..=rounds {
            if round.is_multiple_of(10) {
                eprintln!("{count} volumes: round {round} of {rounds}");
            }
            for (volume, few, many) in &mut measured {
                let calls = if count == scale.few { few } else { many };
                calls.round(client, volume, round > 0)?;
            }
        }
    }
    populate(client, directories, &mut others, 0)?;
    for (volume, few, many) in measured {
        volume.delete(client)?;
        few.print();
        many.print();
    }
    Ok(())
}

/// Publishes or unpublishes volumes of both kinds in turns, until there are `count` of them.
fn populate(
    client: &Client,
    directories: &Directories,
    others: &mut Vec<Volume>,
    count: usize,
) -> Result<()> {
    while others.len() < count {
        let number = others.len();
        let kind = KINDS[number % KINDS.len()];
        let volume = Volume::create(client, directories, &format!("other-{number}"), kind)?;
        volume.stage(client)?;
        volume.publish(client)?;
        others.push(volume);
        if number.is_multiple_of(REPORT_INTERVAL) {
            eprintln!("published {number} of {count} volumes");
        }
    }
    while others.len() > count {
        let Some(volume) = others.pop() else { break };
        volume.unpublish(client)?;
        volume.unstage(client)?;
        volume.delete(client)?;
        if others.len().is_multiple_of(REPORT_INTERVAL) {
            eprintln!("{} volumes are left", others.len());
        }
    }
    Ok(())
}
