//! Allocating a project id, with more and more ids in use.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::Path;

use loopfs::project_quota::{Limits, ProjectId, ProjectIds, ProjectQuota};
use loopfs::{Bytes, Inodes, baseline};

use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

/// A mebi of ids, as of a driver on a machine where others have theirs.
const FIRST: u32 = 1 << 24;
const LAST: u32 = FIRST + (1 << 20) - 1;

struct Plan {
    counts: &'static [u32],
    runs: usize,
    /// System calls that all scans for a gap may make with one count: each makes one for every id in use.
    scan_calls: usize,
}

impl Size {
    fn id_plan(self) -> Plan {
        match self {
            Size::Full => Plan { counts: &[10, 1000, 100_000], runs: 500, scan_calls: 500_000 },
            Size::Quick => Plan { counts: &[10, 1000], runs: 100, scan_calls: 20_000 },
        }
    }
}

/// `directory` is on an XFS with project quotas and nobody else.
pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let plan = size.id_plan();
    let fs = File::open(directory)?;
    // Ids that a killed run left, which are all that the range has.
    remove(&fs)?;
    let result = measure(directory, &fs, &plan);
    remove(&fs)?;
    result
}

fn measure(directory: &Path, fs: &File, plan: &Plan) -> Result<()> {
    let lock = directory.join("loopfs-bench.lock");
    let lock = File::options().read(true).write(true).create(true).truncate(true).open(lock)?;
    let range = id(FIRST)?..=id(LAST)?;
    let limits = Limits::hard(Bytes::MIB, Inodes(1000));
    let mut in_use = 0;
    for &count in plan.counts {
        while in_use < count {
            if in_use % 1000 == 0 {
                stop::check()?;
                eprintln!("{count} ids: {in_use} made");
            }
            baseline::limit_id(fs, FIRST + in_use, Bytes::MIB.0, 1000)?;
            in_use += 1;
        }
        // As a driver that has just been started: it knows no more than the file system does.
        let ids = ProjectIds::new(fs.as_fd(), lock.as_fd(), range.clone())?;
        let mut ours = Samples::new("id_alloc", count as usize);
        let mut scan = Samples::new("id_gap_scan", count as usize);
        // Seldom, for what follows one finds the caches cold.
        let scans = (plan.scan_calls / count as usize).clamp(1, plan.runs / 10);
        for run in 0..plan.runs {
            stop::check()?;
            if run % 20 == 0 {
                eprintln!("{count} ids: run {run} of {}", plan.runs);
            }
            let taken = ours.time(|| ids.reserve(limits))?;
            baseline::limit_id(fs, taken.get(), 0, 0)?;
            if run % plan.runs.div_ceil(scans) == 0 {
                let taken = scan.time(|| first_gap(fs))?;
                baseline::limit_id(fs, taken, 0, 0)?;
            }
        }
        ours.print();
        scan.print();
    }
    Ok(())
}

/// The first id that is not in use, found by asking for each the next that is, and limited as ours.
fn first_gap(fs: &File) -> Result<u32> {
    let mut candidate = FIRST;
    while baseline::next_id(fs, candidate)? == Some(candidate) {
        candidate += 1;
    }
    baseline::limit_id(fs, candidate, Bytes::MIB.0, 1000)?;
    Ok(candidate)
}

fn remove(fs: &File) -> Result<()> {
    let ids: Vec<_> = ProjectQuota::of(fs.as_fd()).ids(id(FIRST)?..=id(LAST)?).collect();
    eprintln!("removing {} ids", ids.len());
    for usage in ids {
        baseline::limit_id(fs, usage?.id.get(), 0, 0)?;
    }
    Ok(())
}

fn id(number: u32) -> Result<ProjectId> {
    ProjectId::new(number).ok_or_else(|| std::io::Error::from(ErrorKind::InvalidInput).into())
}
