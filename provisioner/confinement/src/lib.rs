//! A seccomp filter that a program installs for itself.
//!
//! The provisioner holds `CAP_SYS_ADMIN` for quotactl(2) and the `trusted.*` attributes, and the profile `RuntimeDefault`
//! allows a container with that capability to mount, to enter namespaces and to load BPF programs. Kubernetes has no profile
//! between the two, and a profile of our own (`Localhost`) would have to be a file on each node before the pod starts. A
//! process can install a filter without any of that. Neither the process nor its children can remove the filter again. The
//! kernel applies all filters of a process, so the profile of the container remains in force.
//!
//! `docs/decisions/0034-unprivileged-provisioner.md` gives the reasons.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use linux_raw_sys::general as linux;
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// System calls that fail with EPERM. `open_by_handle_at(2)` is not among them, because a copy of a directory opens files that
/// have several hard links by their handles.
const DENIED: [u32; 27] = [
    // Calls that change the mount table, in the old and in the new interface.
    linux::__NR_mount,
    linux::__NR_umount2,
    linux::__NR_pivot_root,
    linux::__NR_chroot,
    linux::__NR_open_tree,
    linux::__NR_open_tree_attr,
    linux::__NR_move_mount,
    linux::__NR_fsopen,
    linux::__NR_fsconfig,
    linux::__NR_fsmount,
    linux::__NR_fspick,
    linux::__NR_mount_setattr,
    // Calls that create or enter namespaces. For clone(2) see `NEW_NAMESPACE`.
    linux::__NR_setns,
    linux::__NR_unshare,
    // Calls that load code into the kernel, trace it, or start another kernel.
    linux::__NR_bpf,
    linux::__NR_perf_event_open,
    linux::__NR_init_module,
    linux::__NR_finit_module,
    linux::__NR_delete_module,
    linux::__NR_kexec_load,
    linux::__NR_kexec_file_load,
    // Calls that access the memory of other processes.
    linux::__NR_ptrace,
    linux::__NR_process_vm_readv,
    linux::__NR_process_vm_writev,
    // Further calls that the default profile allows with CAP_SYS_ADMIN and that the provisioner does not need.
    linux::__NR_fanotify_init,
    linux::__NR_sethostname,
    linux::__NR_setdomainname,
];

/// Flags of clone(2) that create a namespace. Each is one bit.
const NEW_NAMESPACE: [u32; 8] = [
    linux::CLONE_NEWTIME,
    linux::CLONE_NEWNS,
    linux::CLONE_NEWCGROUP,
    linux::CLONE_NEWUTS,
    linux::CLONE_NEWIPC,
    linux::CLONE_NEWUSER,
    linux::CLONE_NEWPID,
    linux::CLONE_NEWNET,
];

/// Bits that the interfaces of the processor add to the numbers of system calls. The kernel reports calls of the x32 interface as
/// calls of x86-64 with bit 30 set.
#[cfg(target_arch = "x86_64")]
const INTERFACES: [i64; 2] = [0, 0x4000_0000];
#[cfg(not(target_arch = "x86_64"))]
const INTERFACES: [i64; 1] = [0];

/// Denies the calling thread the system calls that mount, create or enter namespaces, or load code into the kernel.
///
/// All threads and processes that the thread starts afterwards inherit the filter. If no other threads exist yet, it confines the
/// whole process. The function also sets `no_new_privs`.
///
/// # Errors
/// When the kernel does not support seccomp filters, or this program does not know the processor's system calls.
pub fn confine_thread() -> Result<(), Error> {
    // The flags of clone3(2) are in memory, where a filter cannot read them. C libraries use clone(2) if clone3(2) fails with
    // ENOSYS.
    let no_clone3 = rules([(linux::__NR_clone3, vec![])]);
    for (rules, errno) in [(no_clone3, ENOSYS), (denied()?, EPERM)] {
        let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
        let (otherwise, matched) = (SeccompAction::Allow, SeccompAction::Errno(errno));
        let program: BpfProgram = SeccompFilter::new(rules, otherwise, matched, architecture)?.try_into()?;
        apply_filter(&program)?;
    }
    Ok(())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn denied() -> Result<Rules, Error> {
    let new_namespace = NEW_NAMESPACE.map(|flag| {
        let is_set = SeccompCmpOp::MaskedEq(flag.into());
        SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Dword, is_set, flag.into())?])
    });
    let new_namespace = new_namespace.into_iter().collect::<Result<Vec<_>, _>>()?;
    let always = DENIED.map(|call| (call, vec![]));
    Ok(rules(always.into_iter().chain([(linux::__NR_clone, new_namespace)])))
}

/// Returns the rules of each call, for each interface that has its own numbers. A call without rules always matches.
fn rules(calls: impl IntoIterator<Item = (u32, Vec<SeccompRule>)>) -> Rules {
    calls
        .into_iter()
        .flat_map(|(call, rules)| INTERFACES.map(|interface| (i64::from(call) | interface, rules.clone())))
        .collect()
}
