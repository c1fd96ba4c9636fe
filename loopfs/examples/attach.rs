//! Attaches an image with direct I/O, prints the path of the device, and detaches it at the end of standard input.
//!
//! Needs Linux 5.8, `CAP_SYS_ADMIN`, and a file system with direct I/O. If the process is killed, the device stays attached;
//! with `Lifetime::AutoClear` the kernel detaches it.
//!
//! ```console
//! # truncate -s 64M /var/tmp/image
//! # cargo run -p loopfs --example attach -- /var/tmp/image
//! /dev/loop65536
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use loopfs::loop_device::{Access, AttachOptions, BlockSize, Detach, DirectIo, LoopControl};

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [path] = args.as_slice() else { return Err("usage: attach IMAGE".into()) };
    let path = Path::new(path);
    // With a descriptor that is open for reading only, the kernel reports other writers of the image in constant time.
    let image = File::open(path).map_err(|error| format!("open {}: {error}", path.display()))?;

    let control = LoopControl::open()?;
    let options = AttachOptions::new(Access::ReadWrite)
        .direct_io(DirectIo::Required)
        .block_size(BlockSize::MatchDirectIo)
        .label("attach example");
    let device = control.attach(&image, &options)?;
    println!("{}", device.path().display());

    let ended = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
    let mut detach = control.detach(device)?;
    if let Detach::Deferred(pending) = detach {
        detach = pending.wait(Duration::from_secs(10))?;
    }
    if let Detach::Deferred(_) = detach {
        let path = path.display();
        return Err(format!("detach {path}: the device is in use, and detached at its last close").into());
    }
    ended?;
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("attach: {error}");
        std::process::exit(1);
    }
}
