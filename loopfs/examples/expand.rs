//! Expands an image, and the devices that it is attached to, while programs use them.
//!
//! Needs Linux 5.8 and `CAP_SYS_ADMIN`. A file system on the device is expanded afterwards, with `xfs_growfs` or `resize2fs`.
//!
//! ```console
//! # cargo run -p loopfs --example expand -- /var/tmp/image 134217728
//! /dev/loop65536: 134217728 bytes (128 MiB)
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;

use loopfs::loop_device::LoopControl;

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [path, size] = args.as_slice() else { return Err("usage: expand IMAGE BYTES".into()) };
    let (path, shown) = (Path::new(path), Path::new(path).display());
    let size: u64 = size.to_str().and_then(|size| size.parse().ok()).ok_or("BYTES must be a number")?;

    let image = File::open(path).map_err(|error| format!("open {shown}: {error}"))?;
    let before = image.metadata()?.len();
    if size < before {
        return Err(format!("expand {shown}: {before} bytes cannot shrink without a loss of data").into());
    }
    // The writer is closed before the search for devices, which would otherwise have to query every device of the machine.
    let writer = File::options().write(true).open(path)?;
    // The new part is sparse. A program that must not run out of space later calls fallocate(2) instead.
    writer.set_len(size).map_err(|error| format!("expand {shown}: {error}"))?;
    writer.sync_all()?;
    drop(writer);

    for device in LoopControl::open()?.find(&image)? {
        println!("{}: {}", device.path().display(), device.refresh_capacity(&image)?);
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("expand: {error}");
        std::process::exit(1);
    }
}
