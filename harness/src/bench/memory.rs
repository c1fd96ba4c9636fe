//! The memory of processes on a node.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use testvm_cluster::Node;

/// The timeout of a program that reads some files of /proc, on an emulated processor.
const TIMEOUT: Duration = Duration::from_secs(60);

const PEAK: &str = "/status:VmHWM:";

/// The current memory of processes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Memory {
    /// The resident set, in which a page counts for each process that has it.
    pub(super) rss: u64,
    /// The proportional set: a page that several processes have is divided among them.
    pub(super) pss: u64,
}

/// Returns the current memory of the processes that run each of `programs`. All must be running.
pub(super) async fn current<const N: usize>(node: &Node, programs: [&str; N]) -> Result<[Memory; N]> {
    // As below, processes that have ended are ignored.
    let links = text(node, "ls -l /proc/[0-9]*/exe").await?;
    let rollups = text(node, "grep -H -E '^(Rss|Pss):' /proc/[0-9]*/smaps_rollup").await?;
    let mut memory = [Memory::default(); N];
    for (memory, program) in memory.iter_mut().zip(programs) {
        *memory = Memory {
            rss: sum(&links, &rollups, "/smaps_rollup:Rss:", &[program])?,
            pss: sum(&links, &rollups, "/smaps_rollup:Pss:", &[program])?,
        };
    }
    Ok(memory)
}

/// Returns the peak resident memory in bytes, since their start, of the processes that run `programs`. All
/// must be running.
pub(super) async fn peak(node: &Node, programs: &[&str]) -> Result<u64> {
    let links = text(node, "ls -l /proc/[0-9]*/exe").await?;
    let peaks = text(node, "grep -H '^VmHWM:' /proc/[0-9]*/status").await?;
    sum(&links, &peaks, PEAK, programs)
}

/// Returns the output of a script that fails for processes that have ended and for kernel threads, so its exit code is ignored.
async fn text(node: &Node, script: &str) -> Result<String> {
    Ok(node.exec(&["sh", "-c", script], TIMEOUT).await?.stdout)
}

/// Sums the values that follow `field`, in lines such as `/proc/1/status:VmHWM:      1234 kB`, over the processes of the
/// programs.
fn sum(links: &str, lines: &str, field: &str, programs: &[&str]) -> Result<u64> {
    let values: BTreeMap<&str, u64> = lines.lines().filter_map(|line| value_of(line, field)).collect();
    let running: Vec<(&str, &str)> = links.lines().filter_map(program_of).collect();
    let mut total = 0;
    for program in programs {
        let of_program = running.iter().filter(|(_, path)| path == program);
        let taken: Vec<u64> = of_program.filter_map(|(pid, _)| values.get(pid).copied()).collect();
        anyhow::ensure!(!taken.is_empty(), "{program} does not run on the node");
        total += taken.iter().sum::<u64>();
    }
    Ok(total)
}

/// Parses `... /proc/1/exe -> /sbin/init`.
fn program_of(line: &str) -> Option<(&str, &str)> {
    let (link, program) = line.split_once(" -> ")?;
    let (_, pid) = link.rsplit_once("/proc/")?;
    Some((pid.strip_suffix("/exe")?, program))
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
    const PEAKS: &str = "/proc/1/status:VmHWM:\t     100 kB\n/proc/20/status:VmHWM:\t       7 kB\n\
                         /proc/21/status:VmHWM:\t      50 kB\n/proc/22/status:VmHWM:\t       2 kB\n";

    #[test]
    fn processes_are_selected_by_their_programs() {
        assert_eq!(sum(LINKS, PEAKS, PEAK, &["/loopfs-csi"]).unwrap(), 9 * 1024);
        assert_eq!(sum(LINKS, PEAKS, PEAK, &["/init", "/opt/loopfs-csi"]).unwrap(), 150 * 1024);
    }

    #[test]
    fn each_field_is_summed_alone() {
        let rollups =
            "/proc/20/smaps_rollup:Rss:          12 kB\n/proc/20/smaps_rollup:Pss:           5 kB\n";
        let of =
            |field| sum(LINKS, &(rollups.to_owned() + &rollups.replace("20", "22")), field, &["/loopfs-csi"]);
        assert_eq!(of("/smaps_rollup:Rss:").unwrap(), 24 * 1024);
        assert_eq!(of("/smaps_rollup:Pss:").unwrap(), 10 * 1024);
    }

    #[test]
    fn a_program_that_does_not_run_is_an_error() {
        let error = sum(LINKS, PEAKS, PEAK, &["/init", "/peer"]).unwrap_err().to_string();
        assert!(error.contains("/peer"), "{error}");
        assert!(sum(LINKS, "", PEAK, &["/init"]).is_err());
    }
}
