//! Attaches an image file as a block device, expands it while it is attached, and detaches it.
//!
//! ```console
//! # cargo run -p loopfs --example attach -- /var/tmp/image
//! ```

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use loopfs::loop_device::{Access, AttachOptions, Detach, DirectIo, LoopControl};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("give the path of an image to make")?;
    let image = File::options().read(true).write(true).create_new(true).open(&path)?;
    image.set_len(1 << 20)?;

    let control = LoopControl::open()?;
    let options = AttachOptions::new(Access::ReadWrite).direct_io(DirectIo::Prefer).label("attach example");
    let device = control.attach(image.as_fd(), &options)?;
    println!("{} shows {}", device.path().display(), device.status()?.size);

    image.set_len(4 << 20)?;
    println!("grown to {}", device.refresh_capacity(&image)?);

    // With this line, a program can later find exactly this attachment, or detect that it no longer exists.
    println!("binding: {}", device.binding());
    match device.detach()? {
        Detach::Detached => println!("detached"),
        Detach::Deferred(pending) => println!("in use: {:?}", pending.wait(Duration::from_secs(5))?),
    }
    std::fs::remove_file(path)?;
    Ok(())
}
