//! The random plan of a test. It depends on the seed alone, not on the results of calls.

use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::calls::{Call, Handle, Index, Mapping, Request};
use super::{FILES, PRIVATE, RANGE, WORKERS};

/// One step. A number `nth` selects one of the devices or users that exist at that time, and [`Handle::planned`] one of the handles.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Concurrent calls of the workers, and at the same time an act of another program, and a kill.
    Round {
        calls: Vec<(usize, Call)>,
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
    let calls = prop::collection::vec((0..WORKERS, call()), 1..=3);
    prop_oneof![
        24 => (0..WORKERS, call()).prop_map(|(worker, call)| alone(worker, call)),
        24 => (calls, prop::option::weighted(0.3, outside_act()), prop::option::weighted(0.15, kill))
            .prop_map(|(calls, outside, kill)| Step::Round { calls, outside, kill }),
        6 => outside_act()
            .prop_map(|act| Step::Round { calls: Vec::new(), outside: Some(act), kill: None }),
        5 => (any::<usize>(), prop::bool::weighted(0.3)).prop_map(|(nth, mount)| Step::Use { nth, mount }),
        3 => (0..FILES).prop_map(|file| Step::Expand { file }),
        2 => (0..WORKERS).prop_map(|worker| alone(worker, Call::UseUpRange)),
    ]
}

fn alone(worker: usize, call: Call) -> Step {
    Step::Round { calls: vec![(worker, call)], outside: None, kill: None }
}

fn call() -> impl Strategy<Value = Call> {
    let handle = || any::<u64>().prop_map(Handle::planned);
    let keep = || prop::option::weighted(0.6, Just(Handle::planned(0)));
    let attachment = || (0..PRIVATE, request(), keep());
    prop_oneof![
        6 => attachment().prop_map(|(file, request, keep)| Call::Attach { file, request, keep }),
        10 => attachment().prop_map(|(file, request, keep)| Call::EnsureAttached { file, request, keep }),
        2 => (0..PRIVATE).prop_map(|file| Call::Find { file }),
        1 => Just(Call::List),
        4 => (0..PRIVATE).prop_map(|file| Call::DetachAll { file }),
        4 => (handle(), any::<bool>()).prop_map(|(handle, tells_pool)| Call::Detach { handle, tells_pool }),
        3 => handle().prop_map(|handle| Call::CancelDetach { handle }),
        3 => handle().prop_map(|handle| Call::RefreshCapacity { handle, file: 0 }),
        2 => handle().prop_map(|handle| Call::Status { handle }),
        4 => handle().prop_map(|handle| Call::Close { handle }),
        2 => (0..4usize).prop_map(|keep| Call::RemoveIdle { keep }),
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
