//! The memory of processes on a node.

use std::collections::BTreeMap;

use anyhow::Result;
use testvm_cluster::Node;

/// The resident set of a process: the pages of a program that another process runs, too, count in full.
pub(super) const CURRENT: &str = "VmRSS:";
/// The largest resident set since the start of the process.
pub(super) const PEAK: &str = "VmHWM:";

/// Returns the bytes of `field` of the processes that run each of `programs`. All must be running. A program is the beginning of a
/// command, as in `/loopfs-provisioner node`.
pub(super) async fn of(node: &Node, field: &str, programs: &[&str]) -> Result<Vec<u64>> {
    // The arguments of a command end with zero bytes. Processes that end in the meantime fail grep, so its exit code is ignored.
    let script =
        format!(r"grep -a -H -E '^(/|{field})' /proc/[0-9]*/cmdline /proc/[0-9]*/status | tr '\0' ' '");
    sums(&node.exec(&["sh", "-c", &script]).await?.stdout, field, programs)
}

/// Sums the values of the processes of each program. The lines are such as `/proc/1/cmdline:/init --option ` and
/// `/proc/1/status:VmRSS:     1234 kB`.
fn sums(lines: &str, field: &str, programs: &[&str]) -> Result<Vec<u64>> {
    let files = lines.lines().filter_map(|line| line.strip_prefix("/proc/")?.split_once(':'));
    let files: BTreeMap<&str, &str> = files.collect();
    let of_program = |program: &&str| {
        let processes = files.iter().filter_map(|(file, command)| {
            let arguments = command.strip_prefix(program)?;
            arguments.starts_with(' ').then_some(file.strip_suffix("/cmdline")?)
        });
        let kib = processes.filter_map(|process| {
            let value = files.get(&*format!("{process}/status"))?.strip_prefix(field)?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        });
        let kib: Vec<u64> = kib.collect();
        anyhow::ensure!(!kib.is_empty(), "{program} does not run on the node");
        Ok(kib.iter().sum::<u64>() * 1024)
    };
    programs.iter().map(of_program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "/proc/1/cmdline:/init \n/proc/20/cmdline:/loopfs-csi node --driver-name=a \n\
                         /proc/21/cmdline:/opt/loopfs-csi node \n/proc/22/cmdline:/loopfs-csi controller \n\
                         /proc/1/status:VmRSS:\t     100 kB\n/proc/20/status:VmRSS:\t       7 kB\n\
                         /proc/21/status:VmRSS:\t      50 kB\n/proc/22/status:VmRSS:\t       2 kB\n\
                         /proc/23/cmdline:/ended \n";

    #[test]
    fn processes_are_selected_by_their_commands() {
        let sums = |programs: &[&str]| sums(LINES, CURRENT, programs).unwrap();
        assert_eq!(sums(&["/loopfs-csi", "/init", "/opt/loopfs-csi"]), [9 * 1024, 100 * 1024, 50 * 1024]);
        assert_eq!(sums(&["/loopfs-csi node", "/loopfs-csi controller"]), [7 * 1024, 2 * 1024]);
    }

    #[test]
    fn program_that_is_absent_is_reported() {
        for program in ["/peer", "/loopfs", "/init node", "/ended"] {
            let error = sums(LINES, CURRENT, &["/init", program]).unwrap_err().to_string();
            assert!(error.contains(program), "{error}");
        }
        assert!(sums(LINES, PEAK, &["/init"]).is_err());
    }
}
