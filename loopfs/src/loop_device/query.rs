//! Queries of many devices, some of which may not respond.
//!
//! Opening a device and reading its status wait for a process that changes the device (`lo_mutex`), and for the file system of its file.
//! A thread therefore makes the queries. If one takes too long, that thread is left behind, and another one goes on with the next device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::device::DOES_NOT_RESPOND;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loop_dev;
use crate::units::DeviceNumber;

/// How long to wait for the first device that does not respond.
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait for each later one: there may be hundreds on the same file system.
const LATER_TIMEOUT: Duration = Duration::from_millis(200);
/// How long to wait for a device whose result a call cannot do without.
const NEEDED_TIMEOUT: Duration = Duration::from_secs(10);

/// Results that the thread may have ready. Each wait for the other thread costs more than a query.
const RESULTS_AHEAD: usize = 64;

/// Threads that still wait for a device, by the device. So each such device has one thread at most.
static WAITING: LazyLock<Mutex<HashMap<DeviceNumber, Weak<()>>>> = LazyLock::new(Mutex::default);

/// Calls `query` for each device, and returns each device with the result. If a device does not respond for a second (200 ms, if another
/// one did not either), its result is [`ErrorKind::Busy`]; the call of `query` ends later, and its result is dropped. `query` must only
/// read.
pub fn query_devices<T, Q>(numbers: Vec<DeviceNumber>, query: Q) -> DeviceQueries<T, Q>
where
    T: Send + 'static,
    Q: Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
{
    let mut left = numbers;
    left.reverse();
    DeviceQueries { left, query, worker: None, timeout: FIRST_TIMEOUT }
}

/// Calls `query` for a device that has not responded, and that the caller needs. It may only be slow.
pub(super) fn query_needed<T: Send + 'static>(
    number: DeviceNumber,
    query: impl Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
) -> Result<T> {
    let (sender, results) = sync_channel(1);
    let in_thread = query.clone();
    let Ok(thread) = loop_dev::spawn("loop-query", move || drop(sender.send(in_thread(number)))) else {
        return query(number);
    };
    match results.recv_timeout(NEEDED_TIMEOUT) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(unresponsive(number)),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => Err(unresponsive(number)),
        },
    }
}

/// The results of [`query_devices`].
#[derive(Debug)]
pub struct DeviceQueries<T, Q> {
    /// The devices without a result, the next one last.
    left: Vec<DeviceNumber>,
    query: Q,
    worker: Option<Worker<T>>,
    timeout: Duration,
}

#[derive(Debug)]
struct Worker<T> {
    results: Receiver<Result<T>>,
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
    /// Exists as long as the thread.
    alive: Weak<()>,
}

impl<T, Q> Iterator for DeviceQueries<T, Q>
where
    T: Send + 'static,
    Q: Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
{
    type Item = (DeviceNumber, Result<T>);

    fn next(&mut self) -> Option<Self::Item> {
        let number = *self.left.last()?;
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None if is_waiting(number) => {
                self.left.pop();
                return Some((number, Err(unresponsive(number))));
            }
            None => match self.start() {
                Ok(worker) => worker,
                // No thread can be created (EAGAIN), so there is no timeout.
                Err(_) => {
                    self.left.pop();
                    return Some((number, (self.query)(number)));
                }
            },
        };
        let result = match worker.results.recv_timeout(self.timeout) {
            Ok(result) => {
                self.worker = Some(worker);
                result
            }
            Err(RecvTimeoutError::Timeout) => {
                self.timeout = LATER_TIMEOUT;
                waiting().insert(number, worker.alive);
                Err(unresponsive(number))
            }
            // It has stopped before a device for which another thread waits.
            Err(RecvTimeoutError::Disconnected) => {
                if let Err(panic) = worker.thread.join() {
                    std::panic::resume_unwind(panic);
                }
                return self.next();
            }
        };
        self.left.pop();
        Some((number, result))
    }
}

impl<T, Q> DeviceQueries<T, Q>
where
    T: Send + 'static,
    Q: Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
{
    fn start(&self) -> std::io::Result<Worker<T>> {
        let (sender, results) = sync_channel(RESULTS_AHEAD);
        let (stop, token) = (Arc::new(AtomicBool::new(false)), Arc::new(()));
        let (alive, query) = (Arc::downgrade(&token), self.query.clone());
        let (numbers, stopped) = (self.left.clone(), Arc::clone(&stop));
        let thread = loop_dev::spawn("loop-query", move || {
            let _token = token;
            run(numbers, &query, &sender, &stopped);
        })?;
        Ok(Worker { results, thread, stop, alive })
    }
}

fn run<T>(
    numbers: Vec<DeviceNumber>,
    query: impl Fn(DeviceNumber) -> Result<T>,
    sender: &SyncSender<Result<T>>,
    stop: &AtomicBool,
) {
    for number in numbers.into_iter().rev() {
        if stop.load(Ordering::Acquire) || is_waiting(number) || sender.send(query(number)).is_err() {
            return;
        }
    }
}

impl<T, Q> Drop for DeviceQueries<T, Q> {
    /// Waits until the thread has closed its device, because an open device defers a detach.
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        worker.stop.store(true, Ordering::Release);
        while worker.results.recv_timeout(self.timeout).is_ok() {}
    }
}

fn unresponsive(number: DeviceNumber) -> Error {
    Error::new(ErrorKind::Busy, "query the loop device", number, DOES_NOT_RESPOND)
}

/// Returns `true` if a thread still waits for a device.
fn is_waiting(number: DeviceNumber) -> bool {
    let mut waiting = waiting();
    waiting.retain(|_, thread| thread.strong_count() > 0);
    waiting.contains_key(&number)
}

fn waiting() -> std::sync::MutexGuard<'static, HashMap<DeviceNumber, Weak<()>>> {
    // A panic leaves the map consistent.
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::sys::loop_dev::reset;

    fn numbers(minors: std::ops::Range<u32>) -> Vec<DeviceNumber> {
        // No other test has this major number, and the threads that wait are of the process.
        minors.map(|minor| DeviceNumber { major: 240, minor }).collect()
    }

    #[test]
    fn unresponsive_devices_are_skipped() {
        reset(|_| {});
        let (release, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let query = move |number: DeviceNumber| {
            if number.minor == 2 {
                blocked.lock().unwrap().recv().ok();
            }
            Ok(number.minor)
        };
        for _ in 0..2 {
            let results: Vec<_> = query_devices(numbers(0..4), query.clone()).collect();
            let minors: Vec<_> = results.iter().map(|(_, result)| result.as_ref().ok().copied()).collect();
            assert_eq!(minors, [Some(0), Some(1), None, Some(3)]);
            let error = results[2].1.as_ref().unwrap_err();
            assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("240:2"), "{error}");
            assert_eq!(waiting().keys().filter(|number| number.major == 240).count(), 1);
        }
        drop(release);
        while is_waiting(numbers(2..3)[0]) {
            std::thread::yield_now();
        }
        assert_eq!(query_devices(numbers(2..3), query).next().unwrap().1.unwrap(), 2);
    }

    #[test]
    fn dropped_queries_end_their_thread() {
        reset(|_| {});
        let token = Arc::new(());
        let query = {
            let token = Arc::clone(&token);
            move |_| Ok(Arc::clone(&token))
        };
        let mut queries = query_devices(numbers(10..500), query);
        drop(queries.next().unwrap().1.unwrap());
        drop(queries);
        assert_eq!(Arc::strong_count(&token), 1);
    }

    #[test]
    #[should_panic(expected = "in a query")]
    fn a_panic_of_a_query_is_propagated() {
        reset(|_| {});
        let panic = |_| -> Result<()> { std::panic::resume_unwind(Box::new("in a query")) };
        let mut queries = query_devices(numbers(600..601), panic);
        queries.timeout = Duration::from_secs(60);
        queries.for_each(drop);
    }
}
