//! Builds a disk image with a partition for each file, such as a file system image, through the partitions of a loop device.
//!
//! The image appears under its name when it is complete. If the process is killed, the kernel detaches the device, and the next call
//! starts again.
//!
//! Needs Linux 5.8, `CAP_SYS_ADMIN`, and the `/dev` of the host, in which the kernel creates the nodes of the partitions.
//!
//! ```console
//! # cargo run -p loopfs --example disk_image -- /var/tmp/disk.img boot.vfat root.ext4
//! /dev/loop65536p1: boot.vfat, 33554432 bytes (32 MiB)
//! /dev/loop65536p2: root.ext4, 268435456 bytes (256 MiB)
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use loopfs::Bytes;
use loopfs::loop_device::{Access, AttachOptions, Detach, DirectIo, Lifetime, LoopControl, LoopDevice};

const SECTOR: u64 = 512;
/// Partitions begin at multiples of a mebibyte.
const ALIGNMENT: u64 = (1 << 20) / SECTOR;

/// A file, and where its partition is, in sectors.
struct Part {
    path: PathBuf,
    start: u64,
    length: u64,
}

fn layout(paths: &[OsString]) -> Result<Vec<Part>, Box<dyn Error>> {
    let mut start = ALIGNMENT;
    let mut parts = Vec::new();
    for path in paths.iter().map(PathBuf::from) {
        let length = fs::metadata(&path)
            .map_err(|error| format!("{}: {error}", path.display()))?
            .len()
            .div_ceil(SECTOR);
        if length == 0 || u32::try_from(start + length).is_err() {
            return Err(format!("{}: a partition has from one sector to 2 TiB", path.display()).into());
        }
        parts.push(Part { path, start, length });
        start = (start + length).next_multiple_of(ALIGNMENT);
    }
    Ok(parts)
}

/// Returns a Master Boot Record.
fn partition_table(parts: &[Part]) -> [u8; 512] {
    let mut table = [0; 512];
    for (entry, part) in table[446..510].chunks_exact_mut(16).zip(parts) {
        // The type Linux, between two positions in cylinders that say that the ones in sectors are valid.
        entry[1..8].copy_from_slice(&[0xfe, 0xff, 0xff, 0x83, 0xfe, 0xff, 0xff]);
        entry[8..12].copy_from_slice(&(part.start as u32).to_le_bytes());
        entry[12..].copy_from_slice(&(part.length as u32).to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    table
}

fn create(path: &Path, parts: &[Part]) -> Result<File, Box<dyn Error>> {
    // What a killed process left. The kernel has detached its device.
    fs::remove_file(path).ok();
    let mut image = File::options().read(true).write(true).create_new(true).open(path)?;
    let end = parts.last().map_or(ALIGNMENT, |part| part.start + part.length);
    image.set_len(end.next_multiple_of(ALIGNMENT) * SECTOR)?;
    image.write_all(&partition_table(parts))?;
    Ok(image)
}

fn fill(device: &LoopDevice, parts: &[Part]) -> Result<(), Box<dyn Error>> {
    let nodes = device.partitions()?;
    if nodes.len() != parts.len() {
        return Err(format!("the kernel found {} partitions instead of {}", nodes.len(), parts.len()).into());
    }
    for (node, part) in nodes.iter().zip(parts) {
        let mut partition = File::options().write(true).open(node)?;
        let copied = std::io::copy(&mut File::open(&part.path)?, &mut partition)?;
        // No call would report a later write error.
        partition.sync_all()?;
        println!("{}: {}, {}", node.display(), part.path.display(), Bytes(copied));
    }
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (output, parts) = match args.as_slice() {
        [output, paths @ ..] if (1..=4).contains(&paths.len()) => (output, layout(paths)?),
        _ => return Err("usage: disk_image OUTPUT FILE... (at most four)".into()),
    };
    let mut incomplete = output.clone();
    incomplete.push(".incomplete");
    let image = create(Path::new(&incomplete), &parts)?;
    let control = LoopControl::open()?;
    let options = AttachOptions::new(Access::ReadWrite)
        .direct_io(DirectIo::Preferred)
        .lifetime(Lifetime::AutoClear)
        .partition_scan(true);
    let device = control.attach(&image, &options)?;
    fill(&device, &parts)?;
    // udev may have a partition open for a moment.
    if let Detach::Deferred(pending) = control.detach(device)?
        && let Detach::Deferred(_) = pending.wait(Duration::from_secs(10))?
    {
        return Err("a process has the device open".into());
    }
    image.sync_all()?;
    if fs::metadata(&incomplete)?.ino() != image.metadata()?.ino() {
        return Err("another process builds the image".into());
    }
    Ok(fs::rename(incomplete, output)?)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("disk_image: {error}");
        std::process::exit(1);
    }
}
