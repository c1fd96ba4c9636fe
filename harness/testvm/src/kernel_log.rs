//! Decides which lines of a kernel's log report a fault.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use regex::Regex;
use serde::Deserialize;

/// The messages of a kernel that crashed, or of one of whose tasks none can be relied on.
const CRASHES: [&str; 8] = [
    "Kernel panic - not syncing",
    "BUG: ",
    "Oops: ",
    "general protection fault",
    "Internal error: ",
    "blocked for more than",
    "rcu: INFO: rcu_sched detected stalls",
    "rcu: INFO: rcu_preempt detected stalls",
];

/// The messages of a kernel that goes on after a fault.
///
/// They are looked for anywhere in a line: the kernel writes each of its lines as a whole, but a program that writes to the
/// console may have begun one.
const FAULTS: [&str; 25] = [
    // WARN(), and lockdep before what it found.
    "WARNING: ",
    // Other checks of locks, and of RCU.
    "INFO: ",
    "refcount_t: ",
    "UBSAN: ",
    "list_add corruption",
    "list_del corruption",
    "page allocation failure",
    "Out of memory: ",
    "VFS: Busy inodes after unmount",
    // XFS.
    "): Corruption ",
    "etadata corruption",
    "Metadata CRC error",
    "ncorrected metadata errors",
    "etadata I/O error",
    "): Internal error",
    "log mount failure",
    "log mount/recovery failed",
    "hutting down filesystem",
    "shutdown received",
    // Block devices: `I/O error, dev vda`, and with the other states of a request.
    " error, dev ",
    "Buffer I/O error",
    "loop: Write error",
    // ext4 and its journal.
    "EXT4-fs error",
    "Aborting journal",
    // Lines that reached no console.
    "printk messages dropped",
];

/// The verdict on a line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Finding {
    /// The kernel crashed: the machine is of no use any more.
    Crash,
    /// The kernel reports a fault and goes on.
    Fault,
}

/// The lines that report a fault and are expected, because a test provokes it.
#[derive(Clone, Debug, Default)]
pub struct ExpectedLines(Arc<Vec<Expected>>);

#[derive(Debug)]
struct Expected {
    pattern: Regex,
    machines: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    expected: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    pattern: String,
    machines: Vec<String>,
    reason: String,
    example: String,
}

impl ExpectedLines {
    /// Reads the list. A project without this file expects no faults.
    ///
    /// # Errors
    /// The file cannot be read, or an entry is of no use.
    pub fn read(path: &Path) -> Result<ExpectedLines> {
        match std::fs::read_to_string(path) {
            Ok(text) => ExpectedLines::parse(&text).with_context(|| format!("parse {}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(ExpectedLines::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    /// Parses the list. Each entry has an example, which proves that it can match a line that would otherwise be a fault.
    fn parse(text: &str) -> Result<ExpectedLines> {
        let file: File = toml::from_str(text)?;
        let rows = file.expected.into_iter().map(|row| {
            let pattern =
                Regex::new(&row.pattern).with_context(|| format!("the pattern {:?}", row.pattern))?;
            anyhow::ensure!(!row.reason.trim().is_empty(), "{:?} has no reason", row.pattern);
            anyhow::ensure!(!row.machines.is_empty(), "{:?} names no machine", row.pattern);
            anyhow::ensure!(
                pattern.is_match(&row.example) && fault(&row.example) == Some(Finding::Fault),
                "the example of {:?} does not match it, or is no fault: correct or remove the entry",
                row.pattern
            );
            Ok(Expected { pattern, machines: row.machines })
        });
        Ok(ExpectedLines(Arc::new(rows.collect::<Result<_>>()?)))
    }

    fn contains(&self, machine: &str, line: &str) -> bool {
        let of_machine = |expected: &Expected| expected.machines.iter().any(|name| name == machine);
        self.0.iter().any(|expected| of_machine(expected) && expected.pattern.is_match(line))
    }
}

/// Returns the verdict on a line of the kernel of `machine`, or `None` if it reports no fault or an expected one. A crash is
/// never expected.
pub(crate) fn classify(line: &str, machine: &str, expected: &ExpectedLines) -> Option<Finding> {
    fault(line).filter(|finding| *finding == Finding::Crash || !expected.contains(machine, line))
}

fn fault(line: &str) -> Option<Finding> {
    let contains = |text: &&str| line.contains(*text);
    if CRASHES.iter().any(contains) {
        Some(Finding::Crash)
    } else if FAULTS.iter().any(contains) {
        Some(Finding::Fault)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Lines of real kernels.
    const CRASH_LINES: &str = "Kernel panic - not syncing: Attempted to kill init!
        BUG: kernel NULL pointer dereference, address: 0
        BUG: KASAN: slab-use-after-free in xfs_iget+0x1/0x2
        BUG: KFENCE: use-after-free read in loop_process_work+0x1/0x2
        watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [kworker/1:1:77]
        INFO: task xfsaild/vdb:77 blocked for more than 122 seconds.
        rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:";
    const FAULT_LINES: &str =
        "WARNING: CPU: 1 PID: 312 at fs/iomap/buffered-io.c:1125 iomap_writepage+0x1/0x2 [xfs]
        WARNING: fs/xfs/xfs_inode.c:1: at xfs_iget+0x1/0x2 [xfs], CPU#0: loopfs/12
        WARNING: possible circular locking dependency detected
        WARNING: possible recursive locking detected
        WARNING: suspicious RCU usage
        guest-init: unWARNING: CPU: 0 PID: 1 at kernel/a.c:1 a+0x0/0x1
        INFO: possible irq lock inversion dependency detected
        INFO: trying to register non-static key.
        rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 1-... }
        refcount_t: underflow; use-after-free.
        UBSAN: array-index-out-of-bounds in drivers/block/loop.c:1:2
        list_del corruption. prev->next should be a, but was b.
        kworker/0:1: page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL|__GFP_ZERO)
        Out of memory: Killed process 77 (loopfs-csi) total-vm:1kB
        VFS: Busy inodes after unmount of vdb (xfs)
        XFS (vda): Corruption detected. Unmount and run xfs_repair
        XFS (vda): Metadata corruption detected at xfs_agf_verify+0x1/0x2, xfs_agf block 0x1
        XFS (vda): metadata I/O error in \"xfs_read_agf+0x1/0x2\" at daddr 0x1 len 1 error 74
        XFS (vda): Metadata CRC error detected at xfs_agf_read_verify+0x1/0x2, xfs_agf block 0x1
        XFS (vda): Uncorrected metadata errors detected; please run xfs_repair.
        XFS (vda): Internal error xfs_trans_cancel at line 1 of file fs/xfs/xfs_trans.c.
        XFS (vda): log mount failure
        XFS (vda): log mount/recovery failed: error -117
        XFS (vda): Log I/O Error (0x2) detected at xlog_ioend_work+0x1/0x2.  Shutting down filesystem.
        XFS (loop3): User initiated shutdown received.
        I/O error, dev vda, sector 8 op 0x1:(WRITE) flags 0x8800 phys_seg 1 prio class 2
        blk_update_request: critical space allocation error, dev loop0, sector 8 op 0x1:(WRITE)
        Buffer I/O error on dev loop3, logical block 0, lost async page write
        loop: Write error at byte offset 4096, length 4096.
        EXT4-fs error (device vda): ext4_lookup:1855: inode #2: comm x: deleted inode referenced: 12
        Aborting journal on device vda-8.
        ** 12 printk messages dropped **";

    #[test]
    fn lines_of_kernels_are_recognised() {
        for (lines, expected) in [(CRASH_LINES, Finding::Crash), (FAULT_LINES, Finding::Fault)] {
            for line in lines.lines().map(str::trim) {
                assert_eq!(fault(line), Some(expected), "{line}");
            }
        }
    }

    #[rstest]
    #[case("XFS (vdb): Mounting V5 Filesystem 0d6f8a2c-0000-4000-8000-000000000000")]
    #[case("XFS (vdb): Ending clean mount")]
    #[case("XFS (vdb): Starting recovery (logdev: internal)")]
    #[case("XFS (vdb): Quotacheck needed: Please wait.")]
    #[case("EXT4-fs (vda): mounted filesystem with ordered data mode. Quota mode: none.")]
    #[case("clocksource: timekeeping watchdog on CPU1: Marking clocksource 'tsc' as unstable")]
    #[case("loop: module loaded")]
    #[case("debugging: nothing")]
    fn an_ordinary_line_is_no_fault(#[case] line: &str) {
        assert_eq!(fault(line), None);
    }

    const LIST: &str = r#"
        [[expected]]
        pattern = '^XFS \(vdb\): User initiated shutdown received\.$'
        machines = ["one"]
        reason = "a test shuts it down"
        example = "XFS (vdb): User initiated shutdown received."
    "#;

    #[rstest]
    #[case::expected("one", "XFS (vdb): User initiated shutdown received.", None)]
    #[case::of_another_machine("two", "XFS (vdb): User initiated shutdown received.", Some(Finding::Fault))]
    #[case::of_another_disk("one", "XFS (vda): User initiated shutdown received.", Some(Finding::Fault))]
    #[case::a_crash("one", "XFS (vdb): BUG: User initiated shutdown received.", Some(Finding::Crash))]
    fn fault_is_expected_on_named_machines(
        #[case] machine: &str,
        #[case] line: &str,
        #[case] finding: Option<Finding>,
    ) {
        assert_eq!(classify(line, machine, &ExpectedLines::parse(LIST).unwrap()), finding);
    }

    /// An entry needs a machine, a reason and an example of a fault that it matches.
    #[rstest]
    #[case::an_example_that_it_does_not_match(LIST.replace("example = \"XFS (vdb)", "example = \"XFS (vdc)"))]
    #[case::an_example_that_is_no_fault(LIST.replace("shutdown received", "something"))]
    #[case::no_machine(LIST.replace("\"one\"", ""))]
    #[case::no_reason(LIST.replace("a test shuts it down", ""))]
    fn incomplete_entry_is_refused(#[case] list: String) {
        assert_ne!(list, LIST);
        assert!(ExpectedLines::parse(&list).is_err());
    }
}
