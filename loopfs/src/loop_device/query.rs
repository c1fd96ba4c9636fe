//! Calls of devices that may not respond.
//!
//! Opening a device, reading its status and removing it wait for a process that changes the device (`lo_mutex`), and for the file system of
//! its file. A thread therefore makes the calls. If one takes too long, that thread is left behind, and another one goes on with the next
//! device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::device::DOES_NOT_RESPOND;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loop_dev;
use crate::units::DeviceNumber;

/// How long to wait for the first device that does not respond.
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait for each later one: there may be hundreds on the same file system.
const LATER_TIMEOUT: Duration = Duration::from_millis(200);
/// How long to wait for a device whose result a call cannot do without. It may only be slow.
pub(super) const NEEDED_TIMEOUT: Duration = Duration::from_secs(10);

/// Results that the thread may have ready. Each wait for the other thread costs more than a query.
const RESULTS_AHEAD: usize = 64;

/// The devices that a thread calls, each with the start of the call. So a device that does not respond has one thread at most.
static CALLED: LazyLock<Mutex<HashMap<CalledDevice, Instant>>> = LazyLock::new(Mutex::default);
static ENDED: Condvar = Condvar::new();

/// The right to call a device, until this is dropped.
pub(super) struct Call(CalledDevice);

/// A device, and the kernel that it is of.
type CalledDevice = (usize, DeviceNumber);

impl Call {
    /// Waits until no other thread calls the device. Returns `None` if its call takes longer than `limit`.
    pub(super) fn begin(number: DeviceNumber, limit: Duration) -> Option<Self> {
        let device = (loop_dev::kernel(), number);
        let mut called = called();
        while let Some(began) = called.get(&device) {
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return None;
            }
            (called, _) = ENDED.wait_timeout(called, left).unwrap_or_else(PoisonError::into_inner);
        }
        called.insert(device, Instant::now());
        Some(Self(device))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        called().remove(&self.0);
        ENDED.notify_all();
    }
}

fn called() -> MutexGuard<'static, HashMap<CalledDevice, Instant>> {
    // A panic leaves the map consistent.
    CALLED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `query` for one device, as [`query_devices`] does.
///
/// # Errors
/// [`ErrorKind::Busy`]: the device has not responded for a second. Those of `query`.
pub fn query_device<T, Q>(number: DeviceNumber, query: Q) -> Result<T>
where
    T: Send + 'static,
    Q: Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
{
    query_within(FIRST_TIMEOUT, number, query)
}

/// As [`query_device`], and waits up to `limit`.
pub(super) fn query_within<T, Q>(limit: Duration, number: DeviceNumber, query: Q) -> Result<T>
where
    T: Send + 'static,
    Q: Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
{
    let mut queries = DeviceQueries { left: vec![number], query, worker: None, timeout: limit, limit };
    queries.next().map_or_else(|| Err(unresponsive(number)), |(_, result)| result)
}

/// Calls `query` for each device, and returns each device with the result. If a device does not respond for a second (200 ms, if another
/// one did not either), its result is [`ErrorKind::Busy`]; the call of `query` ends later, and its result is dropped. Concurrent calls for
/// a device wait for each other for as long, and leave one thread behind. `query` must only read, and must not query the device again.
pub fn query_devices<T, Q>(numbers: Vec<DeviceNumber>, query: Q) -> DeviceQueries<T, Q>
where
    T: Send + 'static,
    Q: Fn(DeviceNumber) -> Result<T> + Clone + Send + 'static,
{
    let mut left = numbers;
    left.reverse();
    DeviceQueries { left, query, worker: None, timeout: FIRST_TIMEOUT, limit: FIRST_TIMEOUT }
}

/// The results of [`query_devices`].
#[derive(Debug)]
pub struct DeviceQueries<T, Q> {
    /// The devices without a result, the next one last.
    left: Vec<DeviceNumber>,
    query: Q,
    worker: Option<Worker<T>>,
    timeout: Duration,
    /// How long a query may wait for one of another thread for the same device.
    limit: Duration,
}

#[derive(Debug)]
struct Worker<T> {
    results: Receiver<Result<T>>,
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
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
            None => match self.start() {
                Ok(worker) => worker,
                // No thread can be created (EAGAIN), so there is no timeout.
                Err(_) => {
                    self.left.pop();
                    return Some((number, call(number, self.limit, &self.query).0));
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
                Err(unresponsive(number))
            }
            Err(RecvTimeoutError::Disconnected) => match worker.thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => Err(unresponsive(number)),
            },
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
        let stop = Arc::new(AtomicBool::new(false));
        let (numbers, query, stopped) = (self.left.clone(), self.query.clone(), Arc::clone(&stop));
        let limit = self.limit;
        let work = move || run(numbers, |number| call(number, limit, &query), &sender, &stopped);
        let thread = loop_dev::spawn("loop-query", work)?;
        Ok(Worker { results, thread, stop })
    }
}

fn run<T>(
    numbers: Vec<DeviceNumber>,
    query: impl Fn(DeviceNumber) -> (Result<T>, Option<Call>),
    sender: &SyncSender<Result<T>>,
    stop: &AtomicBool,
) {
    for number in numbers.into_iter().rev() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let (result, call) = query(number);
        let waiting = match sender.try_send(result) {
            Ok(()) => continue,
            Err(TrySendError::Full(result)) => result,
            Err(TrySendError::Disconnected(late)) => {
                // It may have the device open, and a caller that waits for the call expects that it is closed.
                drop(late);
                return;
            }
        };
        // The device responds. Others need not wait until the results are taken.
        drop(call);
        if sender.send(waiting).is_err() {
            return;
        }
    }
}

/// Returns the result with the call, which ends when it is dropped; `None` if another thread has the device.
fn call<T>(
    number: DeviceNumber,
    limit: Duration,
    query: impl Fn(DeviceNumber) -> Result<T>,
) -> (Result<T>, Option<Call>) {
    match Call::begin(number, limit) {
        Some(call) => (query(number), Some(call)),
        None => (Err(unresponsive(number)), None),
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::*;
    use crate::sys::loop_dev::reset;

    fn numbers(minors: std::ops::Range<u32>) -> Vec<DeviceNumber> {
        // No other test has this major number, and the threads that wait are of the process.
        minors.map(|minor| DeviceNumber { major: 240, minor }).collect()
    }

    /// A result that tells, when it is dropped, whether the device is still being called.
    struct Late(DeviceNumber, mpsc::Sender<bool>);

    impl Drop for Late {
        fn drop(&mut self) {
            self.1.send(Call::begin(self.0, Duration::ZERO).is_none()).unwrap();
        }
    }

    #[test]
    fn a_late_result_is_dropped_before_its_call_ends() {
        reset(|_| {});
        let (release, blocked) = mpsc::channel::<()>();
        let (dropped, was_called) = mpsc::channel();
        let blocked = Arc::new(Mutex::new(blocked));
        let query = move |number: DeviceNumber| {
            blocked.lock().unwrap().recv().unwrap();
            Ok(Late(number, dropped.clone()))
        };
        let number = numbers(90..91)[0];
        let late = query_within(Duration::from_millis(10), number, query);
        assert_eq!(late.err().map(|error| error.kind()), Some(ErrorKind::Busy));
        release.send(()).unwrap();
        assert!(was_called.recv().unwrap());
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
            // The threads may have to wait for a processor.
            const LATE: Duration = Duration::from_secs(60);
            let mut queries = query_devices(numbers(0..4), query.clone());
            queries.timeout = LATE;
            let responsive = [(); 2].map(|()| queries.next().unwrap().1.ok());
            assert_eq!(responsive, [Some(0), Some(1)]);
            queries.timeout = Duration::from_millis(10);
            let error = queries.next().unwrap().1.unwrap_err();
            assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("240:2"), "{error}");
            queries.timeout = LATE;
            assert_eq!(queries.next().unwrap().1.ok(), Some(3));
            assert!(queries.next().is_none());
        }
        drop(release);
        drop(Call::begin(numbers(2..3)[0], Duration::from_secs(60)).unwrap());
        assert_eq!(query_devices(numbers(2..3), query).next().unwrap().1.unwrap(), 2);
    }

    /// A thread for each of them would be left behind.
    #[test]
    fn unresponsive_devices_have_one_thread() {
        reset(|_| {});
        let (release, blocked) = mpsc::channel::<()>();
        let (blocked, begun) = (Arc::new(Mutex::new(blocked)), Arc::new(AtomicUsize::new(0)));
        let query = {
            let begun = Arc::clone(&begun);
            move |_| {
                begun.fetch_add(1, Ordering::Relaxed);
                blocked.lock().unwrap().recv().ok();
                Ok(())
            }
        };
        // The first one is dropped early, the others wait concurrently.
        let mut early = query_devices(numbers(700..702), query.clone());
        early.worker = Some(early.start().unwrap());
        early.timeout = Duration::ZERO;
        while begun.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        drop(early);
        let wait = |_| {
            let query = query.clone();
            let work = move || drop(query_device(numbers(700..701)[0], query).unwrap_err());
            loop_dev::spawn("waiting", work).unwrap()
        };
        let waiting: Vec<_> = (0..4).map(wait).collect();
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        drop(release);
        drop(Call::begin(numbers(700..701)[0], Duration::from_secs(60)).unwrap());
        query_device(numbers(700..701)[0], query).unwrap();
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
        queries.timeout = Duration::from_secs(60);
        drop(queries.next().unwrap().1.unwrap());
        drop(queries);
        assert_eq!(Arc::strong_count(&token), 1);
    }

    #[test]
    #[should_panic(expected = "in a query")]
    fn a_panic_in_queries_is_propagated() {
        reset(|_| {});
        let panic = |_| -> Result<()> { std::panic::resume_unwind(Box::new("in a query")) };
        let mut queries = query_devices(numbers(600..601), panic);
        queries.timeout = Duration::from_secs(60);
        queries.for_each(drop);
    }
}
