//! Prepares a store after a crash, before a program uses it: removes what incomplete operations left, and reports damaged
//! volumes.
//!
//! Needs Linux 5.14, `CAP_SYS_ADMIN`, and the XFS of the store, mounted with `prjquota`.
//!
//! ```console
//! # cargo run -p loopfs --example recover -- /mnt/xfs
//! incomplete volumes removed: 1
//! incomplete expansions undone: 0
//! project ids freed: 0, still charged: 0
//! deleted volumes removed: 2
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;

use loopfs::volume_store::{Condition, StoreOptions, VolumeStore};

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [mount_point] = args.as_slice() else { return Err("usage: recover MOUNT_POINT".into()) };
    // Unlike `open`, it creates no store. An empty mount point must not look like a store without volumes.
    let store = VolumeStore::open_existing(Path::new(mount_point), StoreOptions::default())?;
    store.verify()?;
    let found = store.recover()?;
    println!("incomplete volumes removed: {}", found.unfinished);
    println!("incomplete expansions undone: {}", found.eof_blocks_freed);
    println!("project ids freed: {}, still charged: {}", found.released_ids, found.busy_ids);
    println!("deleted volumes removed: {}", store.empty_trash()?);

    let mut damaged = 0;
    for id in store.list()? {
        if let Condition::Abnormal { reason, message } = store.stats(&id)?.condition {
            println!("{id}: {reason}: {message}");
            damaged += 1;
        }
    }
    if damaged > 0 { Err(format!("{damaged} volumes are damaged").into()) } else { Ok(()) }
}

fn main() {
    if let Err(error) = run() {
        eprintln!("recover: {error}");
        std::process::exit(1);
    }
}
