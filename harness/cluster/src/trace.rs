//! Starts the trace of the programs that processes on a node start, before its first service.

use std::time::Duration;

use testvm_guest::spec::{Mount, Step};

/// The mount point of tracefs.
const TRACEFS: &str = "/sys/kernel/tracing";
/// A trace buffer of its own, so that users of the default buffer do not change it.
pub(crate) const INSTANCE: &str = "/sys/kernel/tracing/instances/programs";
/// Creates the buffer, with room for some 100,000 events of each processor, and enables the two events.
const SETUP: &str = "set -e
mkdir \"$1\"
echo 8192 > \"$1/buffer_size_kb\"
for event in task/task_rename sched/sched_process_exec; do echo 1 > \"$1/events/$event/enable\"; done";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the mount that [`step`] needs.
pub(crate) fn mount() -> Mount {
    Mount::without_disk("tracefs", TRACEFS, "nosuid,nodev,noexec")
}

/// Returns the step that starts the recording.
pub(crate) fn step() -> Step {
    Step::Run {
        name: "trace".into(),
        argv: ["sh", "-c", SETUP, "sh", INSTANCE].map(str::to_owned).into(),
        timeout: TIMEOUT,
    }
}
