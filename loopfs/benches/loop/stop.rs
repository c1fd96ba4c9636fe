//! Stopping a run with a signal. The run ends at the next measurement and removes everything that it created.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, Signal};

use crate::Result;

static STOP_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Blocks the signals and waits for them in a thread. Call it before any other thread starts, because threads inherit the
/// signal mask.
pub(crate) fn on_signals() {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    if signals.thread_block().is_ok() {
        std::thread::spawn(move || {
            if signals.wait().is_ok() {
                STOP_REQUESTED.store(true, Ordering::Relaxed);
            }
        });
    }
}

/// Returns an error if a signal has arrived.
pub(crate) fn check() -> Result<()> {
    if STOP_REQUESTED.load(Ordering::Relaxed) { Err("stopped by a signal".into()) } else { Ok(()) }
}
