//! The program of the test pod: checks its volumes as a container sees them.
//!
//! `volume-check hold` only keeps a pod running. The other verbs run in such a pod, by `kubectl exec`. `check-new` checks volumes of a
//! size, and writes to them. `check-kept` checks what that wrote, at the size to which the volumes were expanded. `check-limit` checks
//! only that no more than a size fits. `plant` fills volumes as a hostile tenant does. `attack` tries what an attacker tries who
//! controls a container of the driver. The others read and write volumes.

mod attack;
mod execution;
mod hostile;
mod mount_flags;
mod pattern;
mod pattern_files;
mod size;
mod volume;

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::ExitCode;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::statvfs::{FsFlags, statvfs};
use pattern::Pattern;
use volume::{Checked, USAGE, Volume, named, parse_volume, parse_volumes};

/// The bytes of a Filesystem volume for each inode, by default.
const BYTES_PER_INODE: u64 = 16384;
/// The name of the file that fills a volume.
const FILLER: &str = "filler";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["check-new", size, flags, volumes @ ..] => check_all(None, size, flags, volumes),
        ["check-kept", before, size, flags, volumes @ ..] => check_all(Some(before), size, flags, volumes),
        ["hold", rest @ ..] => hold(rest),
        ["plant", directory, deep, outside] => plant([directory, deep, outside].map(Path::new)),
        ["attack", volume, kubelet, socket] => attack::run([volume, kubelet, socket].map(Path::new)),
        ["write-pattern", rest @ ..] => pattern_files::write_all(rest),
        ["verify-pattern", rest @ ..] => pattern_files::verify_all(rest),
        ["check-limit", directory, size] => check_limit_below(Path::new(directory), size),
        ["watch-size", volume] => parse_volume(volume).and_then(|volume| size::watch(&volume)),
        ["execute-copy", directory] => execution::copy_and_execute(Path::new(directory)),
        ["write", file, text] => write(Path::new(file), text),
        ["read-at", file, count] => read_at(Path::new(file), count),
        ["read", file] => fs::read_to_string(file).map(|text| print!("{text}")).map_err(|e| named(file, e)),
        _ => Err(USAGE.into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("volume-check: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Plants the files of a hostile tenant, and keeps some of them open.
fn plant([directory, deep, outside]: [&Path; 3]) -> Checked {
    let _open = hostile::plant(directory, deep, outside)?;
    println!("[PLANTED]");
    until_signal()
}

/// Waits for the signal that ends the pod. The kernel ignores a signal for PID 1 of a container unless PID 1 handles it.
fn until_signal() -> Checked {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    signals.wait()?;
    Ok(())
}

/// Writes to volumes and keeps them open until a signal. Prints a line when it has written.
fn hold(volumes: &[&str]) -> Checked {
    let files = pattern_files::write_and_keep_open(volumes)?;
    println!("[HOLDING] {} volumes", files.len());
    until_signal()
}

/// Checks every volume at `size`. The data written at the size `before` must still be there.
fn check_all(before: Option<&str>, size: &str, flags: &str, volumes: &[&str]) -> Checked {
    let before = before.map(str::parse).transpose()?;
    let (size, flags) = (size.parse()?, mount_flags::parse(flags)?);
    for volume in parse_volumes(volumes)? {
        match &volume {
            Volume::Writable(path) => check_writable(path, size, flags, before),
            Volume::Readonly(path) => check_readonly(path, size, flags),
            Volume::Block(path) => check_block(path, size, before),
        }
        .map_err(|reason| format!("{}: {reason}", volume.path().display()))?;
    }
    Ok(())
}

fn check_writable(path: &Path, size: u64, flags: FsFlags, before: Option<u64>) -> Checked {
    check_size(path, size)?;
    expect_equal("mount flags", flags, mount_flags::of_mount(path)?)?;
    let kept = path.join("kept");
    if let Some(before) = before {
        let text = fs::read_to_string(&kept).map_err(|e| named("the file written before the resize", e))?;
        expect_equal("content of the file written before the resize", before.to_string(), text)?;
    } else {
        write(&kept, &size.to_string())?;
    }
    check_limit(&path.join(FILLER), size)
}

/// Checks that at most `size` bytes fit into the volume at `directory`.
fn check_limit_below(directory: &Path, size: &str) -> Checked {
    let size: u64 = size.parse()?;
    check_limit(&directory.join(FILLER), size)
        .map_err(|reason| format!("{}: {reason}", directory.display()).into())
}

/// Writes until the volume is full. At most its size must fit, and not much less.
fn check_limit(file: &Path, size: u64) -> Checked {
    let written = fill(file, size);
    fs::remove_file(file).map_err(|e| named("remove the filler", e))?;
    let written = written?;
    if written > size {
        return Err(format!("{written} bytes fit into a volume of {size}, which is too many").into());
    }
    // The directory itself, the kept file and the file system's rounding use some space.
    if written < size / 4 * 3 {
        return Err(format!("only {written} bytes fit into a volume of {size}").into());
    }
    Ok(())
}

fn fill(file: &Path, size: u64) -> Checked<u64> {
    let mut file = File::create(file).map_err(|e| named("create the filler", e))?;
    let chunk = [0xA5; 16 * 1024];
    let mut written = 0;
    while written <= size {
        match file.write(&chunk) {
            Ok(count) => written += count as u64,
            Err(e) if matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => break,
            Err(e) => return Err(named("fill the volume", e)),
        }
    }
    Ok(written)
}

/// Checks a read-only volume. The runtime mounts it once more, read-only, and runc's remount drops the flags
/// that it does not know. The flags of the StorageClass may therefore be missing here, and the harness checks
/// them on the node.
fn check_readonly(path: &Path, size: u64, flags: FsFlags) -> Checked {
    match File::create(path.join("must-not-be")) {
        Ok(_) => return Err("a write was allowed on the read-only volume".into()),
        Err(e) if e.raw_os_error() == Some(Errno::EROFS as i32) => {}
        Err(e) => return Err(named("a write did not fail with EROFS", e)),
    }
    check_size(path, size)?;
    expect_equal("mount flags", FsFlags::ST_RDONLY, mount_flags::of_mount(path)? - flags)
}

/// Checks the total bytes and inodes that statfs(2) returns.
fn check_size(path: &Path, size: u64) -> Checked {
    let stat = statvfs(path).map_err(|e| named("statfs", e.into()))?;
    expect_equal("total bytes", size, stat.blocks() * stat.fragment_size())?;
    expect_equal("total inodes", size / BYTES_PER_INODE, stat.files())
}

/// Checks a device of exactly `size` bytes, by writing and reading its first and last bytes.
fn check_block(path: &Path, size: u64, before: Option<u64>) -> Checked {
    let mut device = OpenOptions::new().read(true).write(true).open(path).map_err(|e| named("open", e))?;
    expect_equal("size of the device", size, device.seek(SeekFrom::End(0))?)?;
    if let Some(before) = before {
        Pattern::COMMON
            .check(&mut device, 0..before)
            .map_err(|e| format!("written before the resize: {e}"))?;
    }
    device.seek(SeekFrom::Start(0))?;
    device.write_all(&Pattern::COMMON.bytes(0..size)).map_err(|e| named("write the pattern", e))?;
    // Only data that reached the backing file counts.
    device.sync_all().map_err(|e| named("sync", e))?;
    Pattern::COMMON.check(&mut device, 0..size)
}

/// Overwrites the beginning of a file or device. A file is created if it does not exist.
fn write(file: &Path, text: &str) -> Checked {
    let open = OpenOptions::new().write(true).create(true).truncate(false).open(file);
    let done = open.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        // A device that cannot be written may still accept data into the page cache.
        file.sync_all()
    });
    done.map_err(|e| named(&format!("write {}", file.display()), e))
}

/// Prints the first bytes of a file or device.
fn read_at(file: &Path, count: &str) -> Checked {
    let mut bytes = vec![0; count.parse()?];
    let done = File::open(file).and_then(|mut file| file.read_exact(&mut bytes));
    done.map_err(|e| named(&format!("read {}", file.display()), e))?;
    print!("{}", String::from_utf8_lossy(&bytes));
    Ok(())
}

fn expect_equal<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, found: T) -> Checked {
    if expected == found {
        Ok(())
    } else {
        Err(format!("{what}: expected {expected:?}, found {found:?}").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_arguments_of_checks_are_rejected() {
        for (size, flags, volumes) in [
            ("1", "none", [].as_slice()),
            ("x", "none", &["writable:/v"]),
            ("1", "ro", &["writable:/v"]),
            ("1", "none", &["writeable:/v"]),
        ] {
            assert!(check_all(None, size, flags, volumes).is_err(), "{size} {flags} {volumes:?}");
        }
    }

    #[test]
    fn only_intact_pattern_passes() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        fs::write(&image, vec![0; 8192]).unwrap();
        check_block(&image, 8192, None).unwrap();
        check_block(&image, 8192, Some(4096)).unwrap();
        let mut bytes = fs::read(&image).unwrap();
        bytes[4095] ^= 1;
        fs::write(&image, bytes).unwrap();
        let reason = check_block(&image, 8192, Some(4096)).unwrap_err().to_string();
        assert!(reason.contains("byte 4095"), "{reason}");
        assert!(check_block(&image, 4096, None).unwrap_err().to_string().contains("size of the device"));
    }
}
