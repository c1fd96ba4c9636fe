//! Holds a pod's namespaces: waits for the signal that ends the pod, and reaps orphaned processes.

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

fn main() -> anyhow::Result<()> {
    let mut awaited = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGINT, Signal::SIGTERM] {
        awaited.add(signal);
    }
    awaited.thread_block()?;
    loop {
        match awaited.wait() {
            Ok(Signal::SIGCHLD) => reap(),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn reap() {
    while !matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive) | Err(_)) {}
}
