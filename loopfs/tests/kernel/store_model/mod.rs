//! A model test of the volume store: processes with mount namespaces of their own perform random operations on one store, alternate at
//! any of their system calls, and are killed there. In between, the store is compared with a sequential model, and with what the
//! file system has.
//!
//! | file | what it does |
//! |---|---|
//! | `plan.rs`, `operation.rs` | the random plan of a case |
//! | `epoch.rs`, `process.rs`, `system_calls.rs` | performs the plan: which process runs until which system call (ptrace(2)) |
//! | `worker.rs` | a process that performs operations |
//! | `model.rs`, `history.rs` | the sequential model, and the search for an order of the operations that explains their results |
//! | `observed.rs`, `invariants.rs`, `end.rs` | what the file system has at a quiet point, and at the end of a case |
//!
//! `docs/decisions/0073-model-of-the-store.md` gives the reasons.

mod end;
mod epoch;
mod history;
mod invariants;
mod model;
mod observed;
mod operation;
mod plan;
mod process;
mod system_calls;
mod worker;

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::time::Instant;

use loopfs::loop_device::LoopControl;
use loopfs::volume_store::VolumeStore;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

use self::epoch::{Processes, lines};
use self::model::State;
use self::operation::Operation;
use self::plan::Epoch;
use crate::environment::{Leaks, number_from, seed, store};

const SEED: &str = "LOOPFS_TEST_SEED";
/// The number of operations, unless `LOOPFS_TEST_STEPS` is set.
const DEFAULT_STEPS: u64 = 600;
/// Simplifying a failed case ends after this many attempts or milliseconds.
const MAX_ATTEMPTS: u32 = 400;
const MAX_SIMPLIFYING: u32 = 240_000;

/// Several processes use the store concurrently, and some are killed.
#[test]
fn the_store_matches_the_returned_results() {
    if std::env::var_os(worker::ROLE).is_some() {
        return worker::serve();
    }
    let (seed, steps) = (seed(), number_from("LOOPFS_TEST_STEPS").unwrap_or(DEFAULT_STEPS));
    use_one_processor();
    let (_leaks, start) = (Leaks::watch(), Instant::now());
    let (counts, processes) = (Counts::default(), RefCell::new(None));
    let mut runner = TestRunner::new(Config {
        cases: u32::try_from(steps).expect("a number of steps"),
        failure_persistence: None,
        max_shrink_iters: MAX_ATTEMPTS,
        max_shrink_time: MAX_SIMPLIFYING,
        rng_seed: RngSeed::Fixed(seed),
        ..Config::default()
    });
    let outcome = runner.run(&plan::epochs(), |epochs| {
        // A failed case is simplified however many operations that takes.
        if counts.operations.get() >= steps && !counts.failed.get() {
            return Ok(());
        }
        run_case(&epochs, &processes, &counts).map_err(|error| {
            counts.failed.set(true);
            end::remove_everything();
            TestCaseError::fail(error)
        })
    });
    processes.take().into_iter().for_each(Processes::kill);
    let Counts { cases, operations, kills, stops, .. } = counts;
    report(&format!(
        "{SEED}={seed}: {} operations in {} cases, {} kills, {} stops at system calls, {:.1?}",
        operations.get(),
        cases.get(),
        kills.get(),
        stops.get(),
        start.elapsed(),
    ));
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(reason, epochs)) => {
            panic!("{reason}\nthe shortest plan that fails, with {SEED}={seed}:\n{}", plan::print(&epochs))
        }
        Err(error) => panic!("{error}"),
    }
}

/// Runs this thread and its processes, of which only one has work at a time, on one processor. Changing between processors would take
/// longer than most system calls.
fn use_one_processor() {
    let mut processors = CpuSet::new();
    processors.set(0).expect("a processor");
    sched_setaffinity(Pid::from_raw(0), &processors).expect("run on one processor");
}

/// Writes a line to the log of the tests, also if the test passes.
#[allow(clippy::explicit_write, reason = "libtest discards the output of eprintln! if a test passes")]
fn report(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("write to the log");
}

/// What the cases have done, including those that simplified a failed one.
#[derive(Default)]
struct Counts {
    failed: Cell<bool>,
    cases: Cell<u64>,
    operations: Cell<u64>,
    kills: Cell<u64>,
    stops: Cell<usize>,
}

fn run_case(epochs: &[Epoch], processes: &RefCell<Option<Processes>>, counts: &Counts) -> Result<(), String> {
    counts.cases.set(counts.cases.get() + 1);
    let (store, control) = (store(), LoopControl::open().map_err(|error| error.to_string())?);
    let before = store.space().map_err(|error| error.to_string())?;
    let mut running = match processes.take() {
        Some(mut running) => running.restart().map(|()| running),
        None => Processes::start(),
    }?;
    let mut case =
        Case { store: &store, control: &control, state: State::default(), written: 0, abandoned: false };
    let passed = epochs.iter().try_for_each(|epoch| case.run(epoch, &mut running, counts)).and_then(|()| {
        running.restart()?;
        end::check(&store, &control, before).map_err(|error| format!("at the end of the case: {error}"))
    });
    match passed {
        Ok(()) => drop(processes.replace(Some(running))),
        Err(_) => running.kill(),
    }
    passed
}

/// The state of the store at the last quiet point.
struct Case<'a> {
    store: &'a VolumeStore,
    control: &'a LoopControl,
    state: State,
    /// The number that was written to a volume last.
    written: u64,
    /// A process was killed since the last recovery.
    abandoned: bool,
}

impl Case<'_> {
    fn run(&mut self, epoch: &Epoch, processes: &mut Processes, counts: &Counts) -> Result<(), String> {
        let (calls, stops) = processes.perform(epoch)?;
        let killed = calls.iter().filter(|call| call.outcome.is_none()).count();
        counts.operations.set(counts.operations.get() + calls.len() as u64);
        counts.kills.set(counts.kills.get() + killed as u64);
        counts.stops.set(counts.stops.get() + stops);
        let recovered = calls.iter().any(|call| call.operation == Operation::Recover);
        self.abandoned = killed > 0 || self.abandoned && !recovered;
        let failed =
            |error: String| format!("{error}\nthe operations, with the numbers of stops:{}", lines(&calls));
        self.check(&calls).map_err(failed)?;
        invariants::open_images_have_names(processes.pids())
            .map_err(|error| failed(format!("invariant: {error}")))?;
        for volume in &epoch.written {
            if let Some(found) = self.state.volumes.get_mut(volume) {
                self.written += 1;
                observed::write(*volume, self.written).map_err(|error| failed(format!("write: {error}")))?;
                found.content = self.written;
            }
        }
        Ok(())
    }

    fn check(&mut self, calls: &[history::Call]) -> Result<(), String> {
        let found = observed::observe(self.store, self.control)
            .map_err(|error| format!("a volume cannot be read: {error}"))?;
        let possible = history::possible_states(&self.state, calls);
        if !possible.contains(&found) {
            return Err(format!(
                "invariant: some order of the operations explains their results and the state after them\nbefore: \
                 {:?}\npossible after: {possible:?}\nfound: {found:?}",
                self.state
            ));
        }
        self.state = found;
        let space = self.store.space().map_err(|error| error.to_string())?;
        invariants::check(&self.state, space, self.abandoned).map_err(|error| format!("invariant: {error}"))
    }
}
