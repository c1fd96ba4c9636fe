//! Tests of the calls that a confined thread makes. Their arguments cannot succeed or have no effect, so the calls are harmless
//! if they are allowed.

use std::fs::File;
use std::io;
use std::path::Path;

use confinement::confine_thread;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{chroot, pivot_root};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsmount, fsopen, fspick, move_mount, open_tree,
};

const ABSENT: &str = "/no/such/directory";

type Call = (&'static str, fn() -> io::Result<()>);

fn file() -> File {
    File::open("/proc/self/status").unwrap()
}

fn none() -> Option<&'static Path> {
    None
}

/// Without the filter these calls succeed or fail with another errno than EPERM, for every user.
const OF_ANY_USER: [Call; 7] = [
    ("mount", || Ok(mount(none(), ABSENT, none(), MsFlags::MS_BIND, none())?)),
    ("umount2", || Ok(umount2(ABSENT, MntFlags::empty())?)),
    ("open_tree", || Ok(open_tree(CWD, "/", OpenTreeFlags::empty()).map(drop)?)),
    ("fsconfig", || Ok(fsconfig_create(file())?)),
    ("setns", || Ok(setns(file(), CloneFlags::empty())?)),
    ("unshare", || Ok(unshare(CloneFlags::empty())?)),
    ("chroot", || Ok(chroot(ABSENT)?)),
];

/// Without the filter these calls fail with EPERM only for a user without CAP_SYS_ADMIN.
const OF_ROOT: [Call; 5] = [
    ("pivot_root", || Ok(pivot_root(ABSENT, ABSENT)?)),
    ("move_mount", || Ok(move_mount(CWD, ABSENT, CWD, ABSENT, MoveMountFlags::empty())?)),
    ("fsopen", || Ok(fsopen("no-such-file-system", FsOpenFlags::empty()).map(drop)?)),
    ("fsmount", || Ok(fsmount(file(), FsMountFlags::empty(), MountAttrFlags::empty()).map(drop)?)),
    ("fspick", || Ok(fspick(CWD, ABSENT, FsPickFlags::empty()).map(drop)?)),
];

fn is_denied(call: &Call) -> bool {
    call.1().is_err_and(|error| error.raw_os_error() == Some(Errno::EPERM as i32))
}

/// Returns the names of the calls that a confined thread is denied. It confines a new thread, because a filter cannot be removed.
fn denied_in_a_confined_thread(calls: &'static [Call]) -> Vec<&'static str> {
    let confined = std::thread::spawn(|| {
        confine_thread().unwrap();
        // A thread inherits the filter of the thread that starts it.
        let started =
            std::thread::spawn(|| calls.iter().filter(|call| is_denied(call)).map(|call| call.0).collect());
        started.join().unwrap()
    });
    confined.join().unwrap()
}

fn names(calls: &[Call]) -> Vec<&'static str> {
    calls.iter().map(|call| call.0).collect()
}

/// Returns `true` if this process has a filter already, as in a container: it may deny the same calls.
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    !status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "0"))
}

#[test]
fn calls_that_are_allowed_without_the_filter_are_denied_with_it() {
    if !is_filtered() {
        let denied: Vec<_> = OF_ANY_USER.iter().filter(|call| is_denied(call)).map(|call| call.0).collect();
        assert!(denied.is_empty(), "{denied:?} are denied without the filter");
    }
    assert_eq!(denied_in_a_confined_thread(&OF_ANY_USER), names(&OF_ANY_USER));
}

#[test]
fn privileged_calls_are_denied() {
    assert_eq!(denied_in_a_confined_thread(&OF_ROOT), names(&OF_ROOT));
}

#[test]
fn a_confined_thread_can_write_files_and_start_programs() {
    let confined = std::thread::spawn(|| {
        confine_thread().unwrap();
        assert!(std::process::Command::new("/bin/true").status().unwrap().success());
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, b"text").unwrap();
    });
    confined.join().unwrap();
}
