//! The programs that processes on a node started since its boot, as the kernel's tracepoints recorded them.
//!
//! `task_rename` has the name of the process that calls execve(2), `sched_process_exec` the path of the program. The
//! kernel records the first, and then the second, for the same process.

use std::collections::HashMap;

use anyhow::{Context, Result};

use super::node::Node;
use super::trace::INSTANCE;

/// A program that a process on a node started.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StartedProgram {
    /// The name of the process that started it: at most 15 bytes of its program's file name.
    pub by: String,
    /// The path with which it was started.
    pub path: String,
}

impl StartedProgram {
    /// Returns the file name of the program.
    #[must_use]
    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

/// Returns the programs that were started on the node since its boot, in their order on each processor.
///
/// # Errors
/// The trace cannot be read, or the kernel overwrote its beginning.
pub async fn started_programs(node: &Node) -> Result<Vec<StartedProgram>> {
    let lost = "cat \"$1\"/per_cpu/cpu*/stats";
    let stats = node.output(&["sh", "-c", lost, "sh", INSTANCE]).await?;
    anyhow::ensure!(
        is_complete(&stats),
        "the trace of {} has lost events, so programs may be missing:\n{stats}",
        node.name()
    );
    let trace = node.output(&["cat", &format!("{INSTANCE}/trace")]).await?;
    parse(&trace).with_context(|| format!("parse {INSTANCE}/trace of {}", node.name()))
}

/// Returns `true` if no buffer has dropped or overwritten events.
fn is_complete(stats: &str) -> bool {
    let counts = |name: &str| {
        let values = stats.lines().filter_map(move |line| line.strip_prefix(name)?.strip_prefix(": "));
        values.map(str::trim).collect::<Vec<_>>()
    };
    let [overrun, dropped] = ["overrun", "dropped events"].map(counts);
    !overrun.is_empty() && overrun.iter().chain(&dropped).all(|count| *count == "0")
}

/// Parses lines of `COMM-PID [CPU] FLAGS TIME: EVENT: FIELDS`. COMM can have any characters.
fn parse(trace: &str) -> Result<Vec<StartedProgram>> {
    let mut renamed = HashMap::new();
    let mut started = Vec::new();
    for line in trace.lines().filter(|line| !line.starts_with('#')) {
        if let Some((task, fields)) = line.split_once(": task_rename: ") {
            let (_, old) =
                fields.split_once("oldcomm=").with_context(|| format!("no oldcomm in {line:?}"))?;
            let (old, _) = old.split_once(" newcomm=").with_context(|| format!("no newcomm in {line:?}"))?;
            renamed.insert(pid(task)?, old.to_owned());
        } else if let Some((task, fields)) = line.split_once(": sched_process_exec: ") {
            let path = fields.strip_prefix("filename=").and_then(|rest| rest.rsplit_once(" pid="));
            let (path, _) = path.with_context(|| format!("no file name in {line:?}"))?;
            // A process whose name did not change started itself again.
            let by = renamed.remove(&pid(task)?).unwrap_or_default();
            started.push(StartedProgram { by, path: path.to_owned() });
        }
    }
    Ok(started)
}

fn pid(task: &str) -> Result<u32> {
    let parsed = task.rsplit_once(" [").and_then(|(task, _)| task.trim_end().rsplit_once('-'));
    let (_, pid) = parsed.with_context(|| format!("no process in {task:?}"))?;
    pid.parse().with_context(|| format!("no process in {task:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
         kubelet-1234    [001] .....   123.456789: task_rename: pid=1234 oldcomm=kubelet newcomm=mount oom_score_adj=-999
           mount-1234    [001] .....   123.456790: sched_process_exec: filename=/usr/bin/mount pid=1234 old_pid=1234
  a [b: c-d-77      [000] .....   123.5: task_rename: oldcomm=guest-init newcomm=sh oom_score_adj=0
           <...>-88      [000] .....   123.6: task_rename: pid=88 oldcomm=tokio newcomm=worker oom_score_adj=0
              sh-77      [000] .....   123.7: sched_process_exec: filename=/opt/a pid=b pid=77 old_pid=77
              sh-77      [000] .....   123.8: sched_process_exec: filename=/bin/sh pid=77 old_pid=77
";

    #[test]
    fn programs_are_listed_with_starting_process() {
        let started = parse(TRACE).unwrap();
        let started: Vec<_> =
            started.iter().map(|it| (it.by.as_str(), it.path.as_str(), it.name())).collect();
        let expected = [
            ("kubelet", "/usr/bin/mount", "mount"),
            ("guest-init", "/opt/a pid=b", "a pid=b"),
            ("", "/bin/sh", "sh"),
        ];
        assert_eq!(started, expected);
    }

    #[test]
    fn malformed_line_is_refused() {
        for line in [
            "x-1 [0] 1: task_rename: pid=1",
            "x-1 [0] 1: sched_process_exec: pid=1",
            "x [0] 1: task_rename: oldcomm=a newcomm=b",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn trace_with_lost_events_is_incomplete() {
        let stats = "entries: 5\noverrun: 0\ncommit overrun: 0\ndropped events: 0\n";
        assert!(is_complete(stats) && is_complete(&stats.repeat(2)));
        assert!(!is_complete(&format!("{stats}{}", stats.replace("overrun: 0", "overrun: 12"))));
        assert!(!is_complete(&stats.replace("dropped events: 0", "dropped events: 1")));
        assert!(!is_complete(""));
    }
}
