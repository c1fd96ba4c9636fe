//! The memory of processes on a node.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use testvm_cluster::Node;

/// The timeout of a program that reads some files of /proc, on an emulated processor.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The resident set of a process: the pages of a program that another process runs, too, count in full.
const CURRENT: &str = "/status:VmRSS:";
/// The largest resident set since the start of the process.
const PEAK: &str = "/status:VmHWM:";

/// Returns the resident memory in bytes of the processes that run each of `programs`. All must be running. A program is a path, or
/// a path and the first argument, as in `/loopfs-provisioner node`.
pub(super) async fn current<const N: usize>(node: &Node, programs: [&str; N]) -> Result<[u64; N]> {
    let processes = Processes::list(node, CURRENT).await?;
    let mut memory = [0; N];
    for (memory, program) in memory.iter_mut().zip(programs) {
        *memory = processes.sum(&[program])?;
    }
    Ok(memory)
}

/// Returns the peak resident memory in bytes, since their start, of the processes that run `programs`, as in [`current`]. All
/// must be running.
pub(super) async fn peak(node: &Node, programs: &[&str]) -> Result<u64> {
    Processes::list(node, PEAK).await?.sum(programs)
}

/// The processes of a node, as text.
struct Processes {
    /// Lines such as `... /proc/1/exe -> /init`.
    links: String,
    /// Lines such as `/proc/1/cmdline:/init --option `.
    commands: String,
    /// Lines of `/proc/*/status`.
    statuses: String,
    /// What precedes the value in a line of `statuses`, after the process.
    field: &'static str,
}

impl Processes {
    async fn list(node: &Node, field: &'static str) -> Result<Self> {
        Ok(Self {
            links: text(node, "ls -l /proc/[0-9]*/exe").await?,
            commands: text(node, r"grep -a -H '' /proc/[0-9]*/cmdline | tr '\0' ' '").await?,
            statuses: text(node, "grep -H -E '^(VmRSS|VmHWM):' /proc/[0-9]*/status").await?,
            field,
        })
    }

    /// Sums the values over the processes of the programs.
    fn sum(&self, programs: &[&str]) -> Result<u64> {
        let values: BTreeMap<&str, u64> =
            self.statuses.lines().filter_map(|line| value_of(line, self.field)).collect();
        let arguments: BTreeMap<&str, &str> = self.commands.lines().filter_map(argument_of).collect();
        let running: Vec<(&str, &str)> = self.links.lines().filter_map(program_of).collect();
        let mut total = 0;
        for program in programs {
            let (path, argument) = program.split_once(' ').unwrap_or((program, ""));
            let runs = |pid: &str| argument.is_empty() || arguments.get(pid) == Some(&argument);
            let of_program = running.iter().filter(|(pid, running)| *running == path && runs(pid));
            let taken: Vec<u64> = of_program.filter_map(|(pid, _)| values.get(pid).copied()).collect();
            anyhow::ensure!(!taken.is_empty(), "{program} does not run on the node");
            total += taken.iter().sum::<u64>();
        }
        Ok(total)
    }
}

/// Returns the output of a script that fails for processes that have ended and for kernel threads, so its exit code is ignored.
async fn text(node: &Node, script: &str) -> Result<String> {
    Ok(node.exec(&["sh", "-c", script], TIMEOUT).await?.stdout)
}

/// Parses `... /proc/1/exe -> /sbin/init`.
fn program_of(line: &str) -> Option<(&str, &str)> {
    let (link, program) = line.split_once(" -> ")?;
    let (_, pid) = link.rsplit_once("/proc/")?;
    Some((pid.strip_suffix("/exe")?, program))
}

/// Parses `/proc/1/cmdline:/init argument `.
fn argument_of(line: &str) -> Option<(&str, &str)> {
    let (pid, command) = line.strip_prefix("/proc/")?.split_once("/cmdline:")?;
    Some((pid, command.split(' ').nth(1)?))
}

/// Parses the id of the process and the bytes of a line that has the field.
fn value_of<'a>(line: &'a str, field: &str) -> Option<(&'a str, u64)> {
    let (pid, rest) = line.strip_prefix("/proc/")?.split_once(field)?;
    let kib: u64 = rest.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some((pid, kib * 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINKS: &str = "lrwxrwxrwx 1 root root 0 Jan  1 00:00 /proc/1/exe -> /init\n\
                         lrwxrwxrwx 1 root root 0 Jan  1 00:00 /proc/20/exe -> /loopfs-csi\n\
                         lrwxrwxrwx 1 root root 0 Jan  1 00:00 /proc/21/exe -> /opt/loopfs-csi\n\
                         lrwxrwxrwx 1 root root 0 Jan  1 00:00 /proc/22/exe -> /loopfs-csi\n";
    const COMMANDS: &str = "/proc/1/cmdline:/init \n/proc/20/cmdline:/loopfs-csi node --driver-name=a \n\
                            /proc/21/cmdline:/opt/loopfs-csi node \n/proc/22/cmdline:/loopfs-csi controller \n";
    const STATUSES: &str = "/proc/1/status:VmHWM:\t     100 kB\n/proc/20/status:VmRSS:\t       6 kB\n\
                            /proc/20/status:VmHWM:\t       7 kB\n/proc/21/status:VmHWM:\t      50 kB\n\
                            /proc/22/status:VmHWM:\t       2 kB\n";

    fn sum(field: &'static str, programs: &[&str]) -> Result<u64> {
        let [links, commands, statuses] = [LINKS, COMMANDS, STATUSES].map(str::to_owned);
        Processes { links, commands, statuses, field }.sum(programs)
    }

    #[test]
    fn processes_are_selected_by_their_programs() {
        assert_eq!(sum(PEAK, &["/loopfs-csi"]).unwrap(), 9 * 1024);
        assert_eq!(sum(PEAK, &["/init", "/opt/loopfs-csi"]).unwrap(), 150 * 1024);
        assert_eq!(sum(CURRENT, &["/loopfs-csi"]).unwrap(), 6 * 1024);
    }

    #[test]
    fn processes_are_selected_by_first_argument() {
        assert_eq!(sum(PEAK, &["/loopfs-csi node"]).unwrap(), 7 * 1024);
        assert_eq!(sum(PEAK, &["/loopfs-csi controller"]).unwrap(), 2 * 1024);
    }

    #[test]
    fn program_that_is_absent_is_reported() {
        let error = sum(PEAK, &["/init", "/peer"]).unwrap_err().to_string();
        assert!(error.contains("/peer"), "{error}");
        assert!(sum(PEAK, &["/init node"]).is_err());
        assert!(sum(CURRENT, &["/init"]).is_err());
    }
}
