//! Allocating a project id, with an increasing number of ids in use.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::Path;

use loopfs::project_quota::{Limits, ProjectId, ProjectIds, ProjectQuota};
use loopfs::{Bytes, Inodes, baseline};

use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

/// The first of 2^20 ids. The range is large, like that of a driver on a machine where other programs use ids too.
const FIRST: u32 = 1 << 24;
const LAST: u32 = FIRST + (1 << 20) - 1;

struct Plan {
    counts: &'static [u32],
    runs: usize,
    /// Maximum number of system calls of all gap scans with one count. A scan makes one call for each id in use.
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

/// Runs the benchmark. `directory` must be on an XFS with project quotas that no other program uses.
pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let plan = size.id_plan();
    let fs = File::open(directory)?;
    // Removes the ids of a killed run. The range contains no other ids.
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
        // Like a driver that has just started, this allocator has no state beyond that of the file system.
        let ids = ProjectIds::new(fs.as_fd(), lock.as_fd(), range.clone())?;
        let mut ours = Samples::new("id_alloc", count as usize);
        let mut scan = Samples::new("id_gap_scan", count as usize);
        // Scans are rare, because a scan leaves cold caches for the next measurement.
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

/// Finds the first id that is not in use, by querying the next used id from each candidate on. Sets the same limits as the
/// allocator and returns the id.
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
