//! The devices of a file by `losetup -j`, of util-linux and of this project, with an increasing number of devices attached.
//!
//! The time is that of the whole process, as the kubelet waits for it. This project's program remembers attachments between calls, so
//! it is measured in three states: without remembered attachments, with a uevent since the last call, and with none. The other
//! processes of the machine send uevents too; a run with such a uevent is not counted.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::command::output;
use crate::population::Population;
use crate::samples::Series;
use crate::{Result, Size, machine, stop};

pub(crate) const UTIL_LINUX: &str = "/usr/sbin/losetup";
/// The variable with the path of this project's program, and its path in a guest.
const DROP_IN: (&str, &str) = ("LOOPFS_BENCH_DROP_IN", "/tests/programs/losetup");
/// The file with the remembered attachments. It can be deleted at any time.
const REMEMBERED: &str = "/run/loopfs/attachments";
/// The attempts to measure a run in which no other process sends a uevent.
const ATTEMPTS: usize = 100;

const MEASUREMENTS: [&str; 5] = [
    "losetup_start",
    "losetup_j_util_linux",
    "losetup_j_drop_in_first",
    "losetup_j_drop_in_after_uevent",
    "losetup_j_drop_in",
];

pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let (counts, runs): (&[usize], _) = match size {
        Size::Full => (&[10, 1000, 4000], 50),
        Size::Quick => (&[10, 200], 10),
    };
    let drop_in = PathBuf::from(std::env::var_os(DROP_IN.0).unwrap_or_else(|| DROP_IN.1.into()));
    for count in counts {
        eprintln!("{count} devices");
        let mut population = Population::new(directory)?;
        population.resize(*count)?;
        population.close_files();
        let file = population.path("1.img");
        let programs = Programs { drop_in: &drop_in, file: &file };
        let mut series = Series::new(&MEASUREMENTS, *count);
        for _ in 0..runs {
            stop::check()?;
            programs.measure(&mut series)?;
        }
        series.print();
    }
    Ok(())
}

struct Programs<'a> {
    drop_in: &'a Path,
    file: &'a Path,
}

impl Programs<'_> {
    /// Measures each state once. The programs alternate, so that other load on the machine affects both alike.
    fn measure(&self, series: &mut Series) -> Result<()> {
        series.time("losetup_start", || output(Command::new(self.drop_in).arg("--version")))?;
        let found = series.time("losetup_j_util_linux", || self.find(Path::new(UTIL_LINUX)))?;
        if found.is_empty() {
            return Err("losetup of util-linux did not find the device".into());
        }
        match std::fs::remove_file(REMEMBERED) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let first = series.time("losetup_j_drop_in_first", || self.find(self.drop_in))?;
        send_uevent(&found)?;
        let after_uevent = series.time("losetup_j_drop_in_after_uevent", || self.find(self.drop_in))?;
        let unchanged = self.find_unchanged(series)?;
        match [first, after_uevent, unchanged].iter().all(|ours| *ours == found) {
            true => Ok(()),
            false => Err("the programs found different devices".into()),
        }
    }

    fn find_unchanged(&self, series: &mut Series) -> Result<Vec<u8>> {
        for _ in 0..ATTEMPTS {
            let before = uevents()?;
            self.find(self.drop_in)?;
            let started = Instant::now();
            let found = self.find(self.drop_in)?;
            let time = started.elapsed();
            if uevents()? == before {
                series.push("losetup_j_drop_in", time);
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
