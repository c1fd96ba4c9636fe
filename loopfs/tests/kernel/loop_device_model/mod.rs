//! A model test of loop devices: several processes use the library at random, and are killed in the middle of calls, beside another
//! program that has devices of its own, also on the same files, and keeps devices of the library open or mounted.
//!
//! The test runs rounds. In a round, calls of several workers run concurrently. After each round, the invariants must hold, and a
//! sequential reference model must explain the replies and the devices: by some order of the calls, in which each call is a step.
//!
//! `LOOPFS_TEST_SEED` repeats all random choices except the timing, and `LOOPFS_TEST_STEPS` is the number of steps. A failure prints the
//! seed and the last steps.

mod calls;
mod event;
mod invariants;
mod machine;
mod observed;
mod order;
mod outside;
mod plan;
mod reference;
mod worker;

use std::ops::Range;
use std::path::{Path, PathBuf};

use machine::Machine;

use crate::environment::{Leaks, number_from, seed};

/// The processes that use the library.
const WORKERS: usize = 3;
/// The files that devices are bound to: those of the library, and one that only the other program uses.
const FILES: usize = 4;
const PRIVATE: usize = FILES - 1;
/// The file with a file system.
const FORMATTED: usize = 0;
/// The indices of the pools. There are more than devices at any time, so a pool must always find an idle one.
const RANGE: Range<u32> = 0x7_0000..0x7_0010;
const DEFAULT_STEPS: usize = 400;

fn file_path(directory: &Path, file: usize) -> PathBuf {
    directory.join(format!("file-{file}"))
}

#[test]
fn devices_match_the_reference_model() {
    if let Some(directory) = std::env::var_os(worker::WORKER) {
        return worker::run(Path::new(&directory));
    }
    let seed = seed();
    let count = number_from("LOOPFS_TEST_STEPS").map_or(DEFAULT_STEPS, |steps| steps as usize);
    println!("LOOPFS_TEST_SEED={seed} LOOPFS_TEST_STEPS={count}");
    let _leaks = Leaks::watch();
    let mut machine = Machine::new();
    for (number, step) in plan::steps(seed, count).into_iter().enumerate() {
        if let Err(problem) = machine.perform(step) {
            machine.print_history();
            panic!("step {number} with LOOPFS_TEST_SEED={seed}: {problem}");
        }
    }
    if let Err(problem) = machine.finish() {
        machine.print_history();
        panic!("after the last step with LOOPFS_TEST_SEED={seed}: {problem}");
    }
}
