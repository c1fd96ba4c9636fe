//! Measures NodeGetVolumeStats of volumes with few files and with many, beside `du -s`, which walks them. Run by
//! `cargo harness bench csi`, which makes a table and a plot of what this prints: one JSON object in a line, the machine
//! first.
//!
//! ```console
//! # cargo bench -p csi --features bench --bench volume_stats -- /mnt/xfs-with-prjquota du
//! ```
//!
//! The file system must be disposable: it must contain no volumes, and the volumes that are created here remain.

mod files;
#[path = "../../../loopfs/benches/loop/machine.rs"]
mod machine;
#[path = "../../../loopfs/benches/loop/samples.rs"]
#[allow(dead_code, reason = "the other benchmark uses all of it")]
mod samples;
#[path = "../../tests/support/mod.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod support;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use csi_wire::csi::volume_usage::Unit;
use loopfs::Bytes;
use loopfs::volume_store::{StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use samples::Samples;
use support::{Client, Directories, Driver, mount, publish, stats, unpublish};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// The numbers of files of the two volumes.
const FULL: [usize; 2] = [10, 1_000_000];
const QUICK: [usize; 2] = [10, 20_000];

/// The number of rounds. Each round measures all volumes, so that other load of the machine affects all of them alike.
const ROUNDS: usize = 10;
const CALLS_PER_ROUND: usize = 20;
/// Small, because the files are empty.
const BYTES_PER_INODE: NonZeroU64 = NonZeroU64::new(2048).unwrap();

/// The number of rounds that run du, because walking a million files takes some time.
const WALKS: usize = 3;

fn main() -> ExitCode {
    // Cargo itself adds the first of these arguments.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let counts = if args.iter().any(|arg| arg == "--quick") { QUICK } else { FULL };
    let words: Vec<&str> = args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--")).collect();
    let result = match words[..] {
        [directory, ref du @ ..] if !du.is_empty() => run(Path::new(directory), du, counts),
        _ => Err("give the DIRECTORY and the command that is `du` here, and --quick for a short run".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A published volume and its number of files.
struct Published {
    id: String,
    target: PathBuf,
    files: usize,
}

fn run(directory: &Path, du: &[&str], counts: [usize; 2]) -> Result<()> {
    machine::print(directory)?;
    let store = VolumeStore::open(directory, StoreOptions::default())?;
    if !store.list()?.is_empty() {
        return Err(format!("{} holds volumes already", directory.display()).into());
    }
    let scratch = tempfile::tempdir()?;
    let directories = Directories::create(scratch.path(), directory);
    let driver = Driver::start(&directories);
    driver.wait_until_ready();

    let mut volumes = Vec::new();
    for files in counts {
        let volume = Published {
            id: format!("files-{files}"),
            target: directories.kubelet.join(files.to_string()),
            files,
        };
        store.create(&VolumeId::parse(&volume.id)?, &spec(files))?;
        driver.node_publish_volume(publish(&volume.id, &volume.target, mount(&[])))?;
        files::create(&volume.target, files)?;
        volumes.push(volume);
    }
    measure(&driver, du, &volumes)?;
    for volume in &volumes {
        driver.node_unpublish_volume(unpublish(&volume.id, &volume.target))?;
    }
    driver.stop();
    Ok(())
}

/// Returns a specification that is large enough for this number of inodes, those of their directories, and the blocks of the directories.
fn spec(files: usize) -> VolumeSpec {
    let inodes = (files + files::directories(files) + 1).next_multiple_of(1024) as u64;
    let capacity = Bytes(inodes * BYTES_PER_INODE.get());
    let mut spec = VolumeSpec::new(VolumeKind::Filesystem, capacity);
    spec.directory.bytes_per_inode = BYTES_PER_INODE;
    spec
}

fn measure(driver: &Client, du: &[&str], volumes: &[Published]) -> Result<()> {
    let samples = |name| volumes.iter().map(|volume| Samples::new(name, volume.files)).collect::<Vec<_>>();
    let (mut stats_times, mut du_times) = (samples("volume_stats"), samples("du"));
    for round in 0..ROUNDS {
        eprintln!("round {} of {ROUNDS}", round + 1);
        for (volume, (stats_times, du_times)) in volumes.iter().zip(stats_times.iter_mut().zip(&mut du_times))
        {
            for _ in 0..CALLS_PER_ROUND {
                let response =
                    stats_times.time(|| driver.node_get_volume_stats(stats(&volume.id, &volume.target)))?;
                let used =
                    response.usage.iter().find(|usage| usage.unit() == Unit::Inodes).map(|usage| usage.used);
                // A response that does not count all files would be fast for a wrong reason.
                if used != Some((volume.files + files::directories(volume.files) + 1) as i64) {
                    return Err(format!("{} files, and {used:?} inodes in use", volume.files).into());
                }
            }
            if round < WALKS {
                du_times.time(|| disk_usage(du, &volume.target))?;
            }
        }
    }
    stats_times.into_iter().chain(du_times).for_each(Samples::print);
    Ok(())
}

fn disk_usage(du: &[&str], directory: &Path) -> Result<()> {
    let (program, args) = du.split_first().ok_or("no command for `du`")?;
    let status = Command::new(program).args(args).arg("-s").arg(directory).stdout(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(format!("{program} ended with {status}").into()) }
}
