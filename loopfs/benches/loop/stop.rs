//! A signal ends the run at the next measurement, and what was made is cleaned up on the way out.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, Signal};

use crate::Result;

static ASKED: AtomicBool = AtomicBool::new(false);

/// Before any other thread starts, for threads inherit what is blocked.
pub(crate) fn on_signals() {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    if signals.thread_block().is_ok() {
        std::thread::spawn(move || {
            if signals.wait().is_ok() {
                ASKED.store(true, Ordering::Relaxed);
            }
        });
    }
}

/// An error once a signal has come.
pub(crate) fn check() -> Result<()> {
    if ASKED.load(Ordering::Relaxed) { Err("stopped by a signal".into()) } else { Ok(()) }
}
