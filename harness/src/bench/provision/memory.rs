//! The peak memory of processes on a node.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use testvm_cluster::Node;

/// The timeout of a program that reads some files of /proc, on an emulated processor.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the peak resident memory in bytes, since their start, of the processes that run `programs`. All
/// must be running.
pub(super) async fn peak(node: &Node, programs: &[&str]) -> Result<u64> {
    // Both commands fail for processes that have ended and for kernel threads, so their exit codes are ignored.
    let text =
        async |script: &str| Ok::<_, anyhow::Error>(node.exec(&["sh", "-c", script], TIMEOUT).await?.stdout);
    let links = text("ls -l /proc/[0-9]*/exe").await?;
    let peaks = text("grep -H '^VmHWM:' /proc/[0-9]*/status").await?;
    sum(&links, &peaks, programs)
}

fn sum(links: &str, peaks: &str, programs: &[&str]) -> Result<u64> {
    let peaks: BTreeMap<&str, u64> = peaks.lines().filter_map(peak_of).collect();
    let running: Vec<(&str, &str)> = links.lines().filter_map(program_of).collect();
    let mut total = 0;
    for program in programs {
        let of_program = running.iter().filter(|(_, path)| path == program);
        let taken: Vec<u64> = of_program.filter_map(|(pid, _)| peaks.get(pid).copied()).collect();
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

/// Parses `/proc/1/status:VmHWM:      1234 kB`.
fn peak_of(line: &str) -> Option<(&str, u64)> {
    let (pid, rest) = line.strip_prefix("/proc/")?.split_once("/status:VmHWM:")?;
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
        assert_eq!(sum(LINKS, PEAKS, &["/loopfs-csi"]).unwrap(), 9 * 1024);
        assert_eq!(sum(LINKS, PEAKS, &["/init", "/opt/loopfs-csi"]).unwrap(), 150 * 1024);
    }

    #[test]
    fn a_program_that_does_not_run_is_an_error() {
        let error = sum(LINKS, PEAKS, &["/init", "/peer"]).unwrap_err().to_string();
        assert!(error.contains("/peer"), "{error}");
        assert!(sum(LINKS, "", &["/init"]).is_err());
    }
}
