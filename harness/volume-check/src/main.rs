//! The program of the test pod: reports the properties of its volumes as a container sees them.
//!
//! `volume-check watch` checks every volume at the requested size and logs `[INIT-PASSED]` or `[INIT-FAILED]
//! reason`. It then repeats the checks until they pass at the size to which the claims are expanded, and logs
//! `[RESIZE-PASSED]`. `volume-check check-new` and `check-kept` do the first and the last of these checks, once, in a pod of
//! `volume-check hold`, which only keeps a pod running. `plant` fills volumes as a hostile tenant does. `attack` tries what an
//! attacker tries who controls a container of the driver. `check-limit` checks only that no more than a size fits. The other verbs read and write volumes from within a pod, through `kubectl exec`.

mod attack;
mod execution;
mod hostile;
mod http2;
mod mount_flags;
mod pattern;
mod pattern_files;
mod size;
mod volume;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, thread};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::statvfs::{FsFlags, statvfs};
use pattern::Pattern;
use volume::{Checked, USAGE, Volume, named, parse_volume};

/// The bytes of a Filesystem volume for each inode: by default, and in the version that the lane `upgrade` begins with.
const BYTES_PER_INODE: [u64; 2] = [16384, 2048];
/// The name of the file that fills a volume.
const FILLER: &str = "filler";
/// The poll interval for the size of a volume: nothing in a pod announces its expansion.
const POLL: Duration = Duration::from_millis(500);

/// The timeout of a request, so that a silent client does not block others.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["watch", rest @ ..] => Watch::parse(rest).and_then(watch),
        ["check-new", rest @ ..] => Watch::parse(rest).and_then(|watch| check_all(&watch, watch.size, None)),
        ["check-kept", rest @ ..] => {
            Watch::parse(rest).and_then(|watch| check_all(&watch, watch.grown_size, Some(watch.size)))
        }
        ["hold", rest @ ..] => hold(rest),
        ["plant", directory, deep, outside] => plant([directory, deep, outside].map(Path::new)),
        ["attack", volume, kubelet, sockets @ ..] => attack::run([volume, kubelet].map(Path::new), sockets),
        ["write-pattern", rest @ ..] => pattern_files::write_all(rest),
        ["verify-pattern", rest @ ..] => pattern_files::verify_all(rest),
        ["check-limit", directory, size] => check_limit_below(Path::new(directory), size),
        ["watch-size", volume] => parse_volume(volume).and_then(|volume| size::watch(&volume)),
        ["execute-copy", directory] => execution::copy_and_execute(Path::new(directory)),
        ["show", path] => show(Path::new(path)),
        ["write", file, text] => write(Path::new(file), text),
        ["write-at", file, text] => write_at(Path::new(file), text),
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

/// The expected properties of the volumes for `watch`.
#[derive(Debug, PartialEq)]
struct Watch {
    size: u64,
    grown_size: u64,
    flags: FsFlags,
    listen: Option<u16>,
    volumes: Vec<Volume>,
}

impl Watch {
    fn parse(words: &[&str]) -> Checked<Watch> {
        let (mut size, mut grown_size, mut flags, mut listen) = (None, None, FsFlags::empty(), None);
        let mut volumes = Vec::new();
        let mut words = words.iter();
        while let Some(&word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value\n{USAGE}"));
            match word {
                "--size" => size = Some(value()?.parse()?),
                "--grown-size" => grown_size = Some(value()?.parse()?),
                "--flags" => flags = mount_flags::parse(value()?)?,
                "--listen" => listen = Some(value()?.parse()?),
                volume => volumes.push(parse_volume(volume)?),
            }
        }
        if volumes.is_empty() {
            return Err(format!("no volume to check\n{USAGE}").into());
        }
        Ok(Watch {
            size: size.ok_or("--size is missing")?,
            grown_size: grown_size.ok_or("--grown-size is missing")?,
            flags,
            listen,
            volumes,
        })
    }
}

/// Plants the files of a hostile tenant, and keeps some of them open.
fn plant([directory, deep, outside]: [&Path; 3]) -> Checked {
    let _open = hostile::plant(directory, deep, outside)?;
    println!("[PLANTED]");
    ended_by_signal(|| ())
}

/// Runs `work` in a thread of its own. This thread waits for the signal that ends the pod, because the kernel
/// ignores the signal for PID 1 of a container unless it handles it.
fn ended_by_signal(work: impl FnOnce() + Send + 'static) -> Checked {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    thread::spawn(work);
    signals.wait()?;
    Ok(())
}

/// Writes to volumes and keeps them open until a signal. Prints a line when it has written.
fn hold(volumes: &[&str]) -> Checked {
    let files = pattern_files::write_and_keep_open(volumes)?;
    println!("[HOLDING] {} volumes", files.len());
    ended_by_signal(|| ())
}

fn watch(watch: Watch) -> Checked {
    let verdict = Arc::new(Mutex::new(String::from("[CHECKING]")));
    if let Some(port) = watch.listen {
        let listener = TcpListener::bind(("0.0.0.0", port))?;
        let verdict = Arc::clone(&verdict);
        thread::spawn(move || serve(&listener, &verdict));
    }
    ended_by_signal(move || {
        let say = |line: String| {
            println!("{line}");
            *verdict.lock().unwrap_or_else(PoisonError::into_inner) = line;
        };
        if let Err(reason) = check_all(&watch, watch.size, None) {
            return say(format!("[INIT-FAILED] {reason}"));
        }
        say("[INIT-PASSED]".into());
        let mut last = String::new();
        while let Err(reason) = check_all(&watch, watch.grown_size, Some(watch.size)) {
            let reason = reason.to_string();
            if reason != last {
                println!("not grown yet: {reason}");
                last = reason;
            }
            thread::sleep(POLL);
        }
        say("[RESIZE-PASSED]".into());
    })
}

/// Returns the latest verdict to every client, as a test of port forwarding.
fn serve(listener: &TcpListener, verdict: &Mutex<String>) {
    for stream in listener.incoming().flatten() {
        let verdict = verdict.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // A client that disconnects early is no error.
        drop(answer(stream, &verdict));
    }
}

/// Reads the complete request first: closing a socket with unread bytes resets it, and the response is lost.
fn answer(mut stream: TcpStream, verdict: &str) -> io::Result<()> {
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    let request = BufReader::new(stream.try_clone()?);
    for line in request.lines() {
        if line?.is_empty() {
            break;
        }
    }
    let answer = format!("HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n{verdict}", verdict.len());
    stream.write_all(answer.as_bytes())
}

/// Checks every volume at `size`. The data written at the size `before` must still be there.
fn check_all(watch: &Watch, size: u64, before: Option<u64>) -> Checked {
    for volume in &watch.volumes {
        let (path, outcome) = match volume {
            Volume::Writable(path) => (path, check_writable(path, size, watch.flags, before)),
            Volume::Readonly(path) => (path, check_readonly(path, size, watch.flags)),
            Volume::Block(path) => (path, check_block(path, size, before)),
        };
        outcome.map_err(|reason| format!("{}: {reason}", path.display()))?;
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
    if BYTES_PER_INODE.iter().any(|ratio| size / ratio == stat.files()) {
        return Ok(());
    }
    Err(format!("total inodes of {size} bytes: {}", stat.files()).into())
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

fn show(path: &Path) -> Checked {
    let stat = statvfs(path).map_err(|e| named("statfs", e.into()))?;
    let unit = stat.fragment_size();
    println!(
        "{}: {} bytes, {} available, {} inodes, {:?}",
        path.display(),
        stat.blocks() * unit,
        stat.blocks_available() * unit,
        stat.files(),
        stat.flags()
    );
    Ok(())
}

fn write(file: &Path, text: &str) -> Checked {
    let done = File::create(file)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
    done.map_err(|e| named(&format!("write {}", file.display()), e))
}

/// Overwrites the beginning of an existing file or device.
fn write_at(file: &Path, text: &str) -> Checked {
    let done = OpenOptions::new().write(true).open(file).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        // A device that cannot be written may still accept data into the page cache.
        file.sync_all()
    });
    done.map_err(|e| named(&format!("write to {}", file.display()), e))
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
    fn invalid_arguments_of_watch_are_rejected() {
        for words in
            ["", "--size 1 --grown-size 2", "--size 1 writable:/v", "--size x writable:/v", "writeable:/v"]
        {
            assert!(Watch::parse(&words.split_whitespace().collect::<Vec<_>>()).is_err(), "{words:?}");
        }
    }

    #[test]
    fn a_caller_gets_the_whole_verdict() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, &Mutex::new("[INIT-PASSED]".into())));
        for _ in 0..50 {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET / HTTP/1.0\r\nHost: pod\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.ends_with("\r\n\r\n[INIT-PASSED]"), "{answer:?}");
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
