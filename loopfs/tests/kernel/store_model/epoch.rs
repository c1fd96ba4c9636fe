//! Performing the operations of an epoch in the order of its plan.

use std::collections::VecDeque;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::history::Call;
use super::operation::{Operation, Outcome};
use super::plan::{DRIVER, Epoch, PROCESSES};
use super::process::{Process, Stop};

/// How long an epoch may take, on a slow machine too.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The turns after those of the plan, long enough for most operations.
const LONG_TURN: usize = 500;
/// More stops than the operations of an epoch can need. Processes that wait for each other's locks reach it.
const MAX_STOPS: usize = 400_000;

/// The processes that perform operations.
pub(super) struct Processes(Vec<Process>);

/// The state of a process in an epoch.
struct Actor {
    process: Option<Process>,
    operations: VecDeque<Operation>,
    /// The index of the call in progress.
    call: Option<usize>,
    stops: usize,
}

impl Processes {
    pub(super) fn start() -> Result<Self, String> {
        (0..PROCESSES).map(|_| Process::start()).collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = Pid> {
        self.0.iter().map(Process::pid)
    }

    /// Makes the processes the same as those that have just started. Starting them takes longer.
    pub(super) fn restart(&mut self) -> Result<(), String> {
        self.0.iter_mut().try_for_each(|process| match process.perform_alone(Operation::Restart)? {
            (Outcome::Done, _) => Ok(()),
            (_, error) => Err(format!("close everything: {error}")),
        })
    }

    /// Performs the operations of an epoch. Replaces the killed process at the end. Returns the calls and the number of stops.
    pub(super) fn perform(&mut self, epoch: &Epoch) -> Result<(Vec<Call>, usize), String> {
        let pids: Vec<_> = self.0.iter().map(Process::pid).collect();
        let (finished, watched) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // A process that waits in the kernel for a stopped one would wait forever.
                if watched.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                    for pid in pids {
                        kill(pid, Signal::SIGKILL).ok();
                    }
                }
            });
            let mut run = Run::new(std::mem::take(&mut self.0), epoch);
            let ended = run.all_turns(epoch);
            drop(finished);
            let mut driver_died = false;
            for (number, actor) in run.actors.iter_mut().enumerate() {
                let process = match actor.process.take() {
                    Some(process) => process,
                    None => {
                        driver_died |= number == DRIVER;
                        Process::start()?
                    }
                };
                self.0.push(process);
            }
            ended.map_err(|error| format!("{error}; {}", lines(&run.calls)))?;
            if driver_died {
                self.sync_publications(&mut run.calls, run.clock)?;
            }
            Ok((run.calls, run.clock))
        })
    }

    /// Has the new driver compare the records with its mounts, while no other operation is in progress.
    fn sync_publications(&mut self, calls: &mut Vec<Call>, clock: usize) -> Result<(), String> {
        let operation = Operation::SyncPublications;
        let (outcome, message) = self.0[DRIVER].perform_alone(operation)?;
        let begun = Call::begun(DRIVER, operation, clock + 1);
        calls.push(Call { ended: clock + 2, outcome: Some(outcome), message, ..begun });
        Ok(())
    }

    pub(super) fn kill(self) {
        self.0.into_iter().for_each(Process::kill);
    }
}

pub(super) fn lines(calls: &[Call]) -> String {
    calls.iter().map(|call| format!("\n  {call}")).collect()
}

struct Run {
    actors: Vec<Actor>,
    calls: Vec<Call>,
    /// The number of stops of all processes.
    clock: usize,
    kill: Option<(usize, usize)>,
}

impl Run {
    fn new(processes: Vec<Process>, epoch: &Epoch) -> Self {
        let operations_of = |number| {
            let own = epoch.operations.iter().filter(move |(process, _)| *process == number);
            own.map(|(_, operation)| *operation).collect()
        };
        let actors = processes.into_iter().enumerate().map(|(number, process)| Actor {
            process: Some(process),
            operations: operations_of(number),
            call: None,
            stops: 0,
        });
        Self { actors: actors.collect(), calls: Vec::new(), clock: 0, kill: epoch.kill }
    }

    fn all_turns(&mut self, epoch: &Epoch) -> Result<(), String> {
        for (number, stops) in &epoch.turns {
            self.turn(*number, *stops)?;
        }
        while self.actors.iter().any(Actor::has_work) {
            for number in 0..self.actors.len() {
                self.turn(number, LONG_TURN)?;
            }
            if self.clock > MAX_STOPS {
                return Err("the operations do not end".to_owned());
            }
        }
        Ok(())
    }

    /// Lets a process run for a number of stops, or until it has no operation left, or waits for a lock.
    fn turn(&mut self, number: usize, stops: usize) -> Result<(), String> {
        for _ in 0..stops {
            let actor = &mut self.actors[number];
            let Some(process) = &mut actor.process else { return Ok(()) };
            self.clock += 1;
            let call = match actor.call {
                Some(call) => call,
                None => {
                    let Some(operation) = actor.operations.pop_front() else { return Ok(()) };
                    process.send(operation);
                    self.calls.push(Call::begun(number, operation, self.clock));
                    *actor.call.insert(self.calls.len() - 1)
                }
            };
            actor.stops += 1;
            let stop = process.run_to_next_stop()?;
            if stop == Stop::Idle {
                let (outcome, message) = process.outcome()?;
                (self.calls[call].outcome, self.calls[call].message) = (Some(outcome), message);
                self.calls[call].ended = self.clock;
                actor.call = None;
            } else if self.kill == Some((number, actor.stops)) {
                self.calls[call].ended = self.clock;
                actor.operations.clear();
                actor.call = None;
                actor.process.take().into_iter().for_each(Process::kill);
            }
            if stop == Stop::Sleep {
                return Ok(());
            }
        }
        Ok(())
    }
}

impl Actor {
    fn has_work(&self) -> bool {
        self.call.is_some() || !self.operations.is_empty()
    }
}
