//! Prints the loop devices of a file, or without an argument the stray devices of this machine.
//!
//! A device is stray if its file was deleted or replaced. The file system cannot free the space of the file before the device is
//! detached. A file that is visible only in another mount namespace looks deleted too.
//!
//! Needs Linux 5.8, `CAP_SYS_ADMIN`, and `/sys`.
//!
//! ```console
//! # cargo run -p loopfs --example devices -- /var/tmp/image
//! loop65536 seq=12 dev=254:0 ino=131 offset=0 limit=0 rw: 67108864 bytes (64 MiB), direct I/O
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use loopfs::loop_device::{LoopControl, Status, unmanaged};

/// Prints the binding first. With this text, `Binding` finds exactly this attachment later, or reports that it no longer exists.
fn print(status: &Status) {
    let io = if status.direct_io { "direct I/O" } else { "buffered I/O" };
    println!("{}: {}, {io}", status.binding, status.size);
}

fn is_stray(status: &Status) -> bool {
    let path = unmanaged::attributes(status.binding.index).backing_path;
    let found = path.and_then(|path| std::fs::metadata(path).ok());
    let backing = status.binding.backing;
    found.is_none_or(|file| (file.dev(), file.ino()) != (backing.device.to_raw(), backing.inode))
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let control = LoopControl::open()?;
    match args.as_slice() {
        [] => control.list()?.devices.iter().filter(|status| is_stray(status)).for_each(print),
        [path] => {
            let path = Path::new(path);
            let file = File::open(path).map_err(|error| format!("open {}: {error}", path.display()))?;
            for device in control.find(&file)? {
                print(&device.status()?);
            }
        }
        _ => return Err("usage: devices [FILE]".into()),
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("devices: {error}");
        std::process::exit(1);
    }
}
