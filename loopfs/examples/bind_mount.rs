//! Bind-mounts a directory with flags of its own, such as read-only, and unmounts it again.
//!
//! Needs Linux 5.12 and `CAP_SYS_ADMIN`. The mount is never visible without its flags. It does not inherit the flags of its
//! source.
//!
//! ```console
//! # cargo run -p loopfs --example bind_mount -- /srv/data /mnt/data ro,nosuid,nodev
//! ro,nosuid,nodev,relatime
//! # cargo run -p loopfs --example bind_mount -- /mnt/data
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;

use loopfs::mount::{MountFlags, bind_mount, table, unmount};

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match args.as_slice() {
        [target] => {
            if !unmount(Path::new(target))? {
                return Err(format!("nothing is mounted at {}", Path::new(target).display()).into());
            }
        }
        [source, target, options] => {
            let options = options.to_str().ok_or("OPTIONS must be UTF-8")?;
            let flags = MountFlags::from_options(&options.split(',').collect::<Vec<_>>())?;
            let source = Path::new(source);
            let opened = File::open(source).map_err(|error| format!("open {}: {error}", source.display()))?;
            bind_mount(&opened, Path::new(target), flags)?;
            // The mount table has absolute paths.
            let target = std::fs::canonicalize(target)?;
            let mounts = table::read()?;
            let mount = table::at(&mounts, &target).ok_or("the mount was removed in the meantime")?;
            println!("{}", mount.options.join(","));
        }
        _ => return Err("usage: bind_mount SOURCE TARGET OPTIONS | TARGET".into()),
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("bind_mount: {error}");
        std::process::exit(1);
    }
}
