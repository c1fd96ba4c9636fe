//! The devices of a file by `losetup -j`, of util-linux and of this project, with an increasing number of devices attached.
//!
//! The time is that of the whole process, as the kubelet waits for it. This project's program remembers attachments between calls, so
//! it is measured in three states: without remembered attachments, with a uevent since the last call, and with none. The other
//! processes of the machine send uevents too; a run with such a uevent is not counted.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::output;
use crate::population::Population;
use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

/// The programs, and their paths in a guest.
const UTIL_LINUX: (&str, &str) = ("LOOPFS_BENCH_UTIL_LINUX", "/usr/sbin/losetup");
const DROP_IN: (&str, &str) = ("LOOPFS_BENCH_DROP_IN", "/tests/programs/losetup");
/// The file with the remembered attachments. It can be deleted at any time.
const REMEMBERED: &str = "/run/loopfs/attachments";
/// The attempts to measure a run in which no other process sends a uevent.
const ATTEMPTS: usize = 100;

struct Plan {
    counts: &'static [usize],
    runs: usize,
}

impl Size {
    fn losetup_plan(self) -> Plan {
        match self {
            Size::Full => Plan { counts: &[10, 1000, 4000], runs: 50 },
            Size::Quick => Plan { counts: &[10, 200], runs: 10 },
        }
    }
}

pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let plan = size.losetup_plan();
    let [util_linux, drop_in] = [UTIL_LINUX, DROP_IN]
        .map(|(variable, path)| std::env::var_os(variable).map_or_else(|| path.into(), PathBuf::from));
    for count in plan.counts {
        eprintln!("{count} devices");
        let mut population = Population::new(directory)?;
        population.resize(*count)?;
        population.close_files();
        let file = population.path("1.img");
        let programs = Programs { util_linux: &util_linux, drop_in: &drop_in, file: &file };
        let mut series = Series::new(*count);
        for _ in 0..plan.runs {
            stop::check()?;
            programs.measure(&mut series)?;
        }
        series.print();
    }
    Ok(())
}

/// All measurements with `n` devices attached.
struct Series {
    start: Samples,
    util_linux: Samples,
    first: Samples,
    after_uevent: Samples,
    unchanged: Samples,
}

impl Series {
    fn new(n: usize) -> Self {
        Self {
            start: Samples::new("losetup_start", n),
            util_linux: Samples::new("losetup_j_util_linux", n),
            first: Samples::new("losetup_j_drop_in_first", n),
            after_uevent: Samples::new("losetup_j_drop_in_after_uevent", n),
            unchanged: Samples::new("losetup_j_drop_in", n),
        }
    }

    fn print(self) {
        let Self { start, util_linux, first, after_uevent, unchanged } = self;
        [start, util_linux, first, after_uevent, unchanged].into_iter().for_each(Samples::print);
    }
}

struct Programs<'a> {
    util_linux: &'a Path,
    drop_in: &'a Path,
    file: &'a Path,
}

impl Programs<'_> {
    /// Measures each state once. The programs alternate, so that other load on the machine affects both alike.
    fn measure(&self, series: &mut Series) -> Result<()> {
        series.start.time(|| output(Command::new(self.drop_in).arg("--version")))?;
        let found = series.util_linux.time(|| self.find(self.util_linux))?;
        if found.is_empty() {
            return Err("losetup of util-linux did not find the device".into());
        }
        match std::fs::remove_file(REMEMBERED) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let first = series.first.time(|| self.find(self.drop_in))?;
        send_uevent(&found)?;
        let after_uevent = series.after_uevent.time(|| self.find(self.drop_in))?;
        let unchanged = self.find_unchanged(&mut series.unchanged)?;
        match [first, after_uevent, unchanged].iter().all(|ours| *ours == found) {
            true => Ok(()),
            false => Err("the programs found different devices".into()),
        }
    }

    fn find_unchanged(&self, samples: &mut Samples) -> Result<Vec<u8>> {
        for _ in 0..ATTEMPTS {
            let before = uevents()?;
            self.find(self.drop_in)?;
            let mut attempt = samples.like();
            let found = attempt.time(|| self.find(self.drop_in))?;
            if uevents()? == before {
                samples.append(attempt);
                return Ok(found);
            }
        }
        Err("other processes of this machine send uevents all the time".into())
    }

    fn find(&self, program: &Path) -> Result<Vec<u8>> {
        output(Command::new(program).arg("-j").arg(self.file))
    }
}

fn uevents() -> Result<String> {
    Ok(std::fs::read_to_string("/sys/kernel/uevent_seqnum")?)
}

/// Sends a uevent for the device on a line of losetup, as udevadm-trigger(8) does.
fn send_uevent(line: &[u8]) -> Result<()> {
    let line = String::from_utf8_lossy(line);
    let name = line.split(':').next().and_then(|path| path.strip_prefix("/dev/"));
    let name = name.ok_or_else(|| format!("losetup printed {line:?}"))?;
    let before = uevents()?;
    std::fs::write(format!("/sys/block/{name}/uevent"), "change")?;
    if uevents()? == before { Err("the kernel sent no uevent".into()) } else { Ok(()) }
}
