//! The system calls before which a process stops: a filter (seccomp(2)) that the process installs.
//!
//! The process stops before each system call, except those that neither read nor change anything that another process can see.
//! Stops before and after these, or after the others, would add no other interleaving.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO,
    SECCOMP_RET_TRACE, c_long,
};
use seccompiler::{BpfProgram, sock_filter};

/// The classes of system calls, which the tracer reads at a stop.
pub(super) const OTHER: u16 = 0;
/// The process reads the next operation.
pub(super) const IDLE: u16 = 1;
pub(super) const SLEEP: u16 = 2;
/// The process requests or releases a lease.
pub(super) const LEASE: u16 = 3;

/// Calls of only this process: memory, signals, time, randomness and its own threads.
const PRIVATE: [c_long; 16] = [
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_clock_gettime,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_geteuid,
    libc::SYS_sched_yield,
];
/// Calls of fcntl(2) that concern only the descriptor.
const OF_DESCRIPTOR: [i32; 4] = [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL];
const STANDARD_INPUT: i32 = 0;
const STANDARD_OUTPUT: i32 = 1;

/// Installs the filter for the calling thread. A tracer must be attached, because the calls fail otherwise.
pub(super) fn stop_before_them() {
    seccompiler::apply_filter(&program()).expect("install the filter of system calls");
}

fn program() -> BpfProgram {
    let mut program = vec![load(NUMBER)];
    for number in PRIVATE {
        program.extend(rule(number, None, SECCOMP_RET_ALLOW));
    }
    for command in OF_DESCRIPTOR {
        program.extend(rule(libc::SYS_fcntl, Some((1, command)), SECCOMP_RET_ALLOW));
    }
    // A thread would have the filter without a tracer. The library then makes the calls itself.
    for number in [libc::SYS_clone, libc::SYS_clone3] {
        program.extend(rule(number, None, SECCOMP_RET_ERRNO | libc::EAGAIN.cast_unsigned()));
    }
    program.extend(rule(libc::SYS_write, Some((0, STANDARD_OUTPUT)), SECCOMP_RET_ALLOW));
    program.extend(rule(libc::SYS_read, Some((0, STANDARD_INPUT)), stop(IDLE)));
    program.extend(rule(libc::SYS_nanosleep, None, stop(SLEEP)));
    program.extend(rule(libc::SYS_clock_nanosleep, None, stop(SLEEP)));
    program.extend(rule(libc::SYS_fcntl, Some((1, libc::F_SETLEASE)), stop(LEASE)));
    program.push(instruction(BPF_RET | BPF_K, stop(OTHER)));
    program
}

fn stop(class: u16) -> u32 {
    SECCOMP_RET_TRACE | u32::from(class)
}

/// Returns the instructions that return `action` for a system call, if the argument with an index has a value.
fn rule(number: c_long, argument: Option<(u32, i32)>, action: u32) -> Vec<sock_filter> {
    let number = u32::try_from(number).expect("the number of a system call");
    let returned = instruction(BPF_RET | BPF_K, action);
    match argument {
        None => vec![equals_or_skip(number, 1), returned],
        Some((index, value)) => vec![
            equals_or_skip(number, 4),
            load(ARGUMENTS + 8 * index),
            equals_or_skip(value.cast_unsigned(), 1),
            returned,
            load(NUMBER),
        ],
    }
}

/// The offsets of fields of `struct seccomp_data`.
const NUMBER: u32 = 0;
/// The lower half of each argument comes first, because the processors are little-endian.
const ARGUMENTS: u32 = 16;

fn load(offset: u32) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, offset)
}

/// Skips instructions if the loaded value differs.
fn equals_or_skip(value: u32, skipped: u8) -> sock_filter {
    sock_filter { jf: skipped, ..instruction(BPF_JMP | BPF_JEQ | BPF_K, value) }
}

fn instruction(code: u32, k: u32) -> sock_filter {
    sock_filter { code: u16::try_from(code).expect("the code of an instruction"), jt: 0, jf: 0, k }
}
