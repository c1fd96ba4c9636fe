//! The random plan of a test. It depends on the seed alone, not on the results of calls.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::calls::{Index, Mapping, Request};
use super::{FILES, PRIVATE, RANGE, WORKERS};

/// One step. A number `nth` selects one of the devices, handles or users that exist at that time.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Concurrent calls of the workers, and at the same time an act of another program, and a kill.
    Round {
        calls: Vec<(usize, PlannedCall)>,
        outside: Option<OutsideAct>,
        /// Kills the worker this long after the calls have begun.
        kill: Option<(usize, Duration)>,
    },
    /// Another program opens or mounts a device, which defers its detach.
    Use {
        nth: usize,
        mount: bool,
    },
    Expand {
        file: usize,
    },
    /// One pool returns every idle index of the range.
    UseUpRange {
        worker: usize,
    },
}

#[derive(Clone, Debug)]
pub(super) enum PlannedCall {
    Attach { file: usize, request: Request, keep: bool },
    EnsureAttached { file: usize, request: Request, keep: bool },
    Find { file: usize },
    List,
    DetachAll { file: usize },
    Detach { nth: usize, tells_pool: bool },
    CancelDetach { nth: usize },
    RefreshCapacity { nth: usize },
    Status { nth: usize },
    Close { nth: usize },
    RemoveIdle { keep: usize },
}

/// An act of a program that does not use the library.
#[derive(Clone, Debug)]
pub(super) enum OutsideAct {
    /// Binds a file to the lowest free index, or to one in the range of the pools.
    Bind {
        file: usize,
        read_only: bool,
        index: Option<u32>,
        losetup: bool,
    },
    Unbind {
        nth: usize,
        losetup: bool,
    },
    /// Closes or unmounts a device.
    Leave {
        nth: usize,
    },
}

/// Returns the steps of a seed.
pub(super) fn steps(seed: u64, count: usize) -> Vec<Step> {
    let rng = TestRng::from_seed(RngAlgorithm::XorShift, &[seed, !seed].map(u64::to_le_bytes).concat());
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = step();
    (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

fn step() -> impl Strategy<Value = Step> {
    let kill = (0..WORKERS, (0..6000u64).prop_map(Duration::from_micros));
    let calls = prop::collection::vec((0..WORKERS, planned_call()), 1..=3);
    prop_oneof![
        24 => (0..WORKERS, planned_call())
            .prop_map(|call| Step::Round { calls: vec![call], outside: None, kill: None }),
        24 => (calls, prop::option::weighted(0.3, outside_act()), prop::option::weighted(0.15, kill))
            .prop_map(|(calls, outside, kill)| Step::Round { calls, outside, kill }),
        6 => outside_act()
            .prop_map(|act| Step::Round { calls: Vec::new(), outside: Some(act), kill: None }),
        5 => (any::<usize>(), prop::bool::weighted(0.3)).prop_map(|(nth, mount)| Step::Use { nth, mount }),
        3 => (0..FILES).prop_map(|file| Step::Expand { file }),
        2 => (0..WORKERS).prop_map(|worker| Step::UseUpRange { worker }),
    ]
}

fn planned_call() -> impl Strategy<Value = PlannedCall> {
    let nth = any::<usize>;
    let attachment = || (0..PRIVATE, request(), prop::bool::weighted(0.6));
    prop_oneof![
        6 => attachment().prop_map(|(file, request, keep)| PlannedCall::Attach { file, request, keep }),
        10 => attachment().prop_map(|(file, request, keep)| PlannedCall::EnsureAttached { file, request, keep }),
        2 => (0..PRIVATE).prop_map(|file| PlannedCall::Find { file }),
        1 => Just(PlannedCall::List),
        4 => (0..PRIVATE).prop_map(|file| PlannedCall::DetachAll { file }),
        4 => (nth(), any::<bool>()).prop_map(|(nth, tells_pool)| PlannedCall::Detach { nth, tells_pool }),
        3 => nth().prop_map(|nth| PlannedCall::CancelDetach { nth }),
        3 => nth().prop_map(|nth| PlannedCall::RefreshCapacity { nth }),
        2 => nth().prop_map(|nth| PlannedCall::Status { nth }),
        4 => nth().prop_map(|nth| PlannedCall::Close { nth }),
        2 => (0..4usize).prop_map(|keep| PlannedCall::RemoveIdle { keep }),
    ]
}

/// Most requests are equal, so that a repeated attachment finds the properties that it requests.
fn request() -> impl Strategy<Value = Request> {
    let mapping = prop_oneof![
        8 => Just((0, 0, 512)),
        1 => Just((4096, 0, 512)),
        1 => Just((0, 1 << 16, 512)),
        1 => Just((4096, 1 << 16, 4096)),
    ];
    let direct_io = prop_oneof![6 => Just(Some(true)), 1 => Just(Some(false)), 2 => Just(None)];
    let index = prop_oneof![
        12 => Just(Index::Pool),
        1 => Just(Index::Any),
        1 => RANGE.prop_map(Index::Exact),
    ];
    let flags = (prop::bool::weighted(0.25), prop::bool::weighted(0.85), prop::bool::weighted(0.15));
    (mapping, direct_io, index, flags).prop_map(|(mapping, direct_io, index, flags)| {
        let ((offset, limit, block_size), (read_only, discard, auto_clear)) = (mapping, flags);
        let mapping = Mapping { read_only, offset, limit, block_size };
        Request { mapping, direct_io, discard, auto_clear, index }
    })
}

fn outside_act() -> impl Strategy<Value = OutsideAct> {
    let index = prop::option::weighted(0.3, RANGE);
    let bind = (0..FILES, prop::bool::weighted(0.4), index, any::<bool>());
    prop_oneof![
        4 => bind.prop_map(|(file, read_only, index, losetup)| OutsideAct::Bind { file, read_only, index, losetup }),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(nth, losetup)| OutsideAct::Unbind { nth, losetup }),
        5 => any::<usize>().prop_map(|nth| OutsideAct::Leave { nth }),
    ]
}
