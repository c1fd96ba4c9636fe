//! Power cuts: threads change the store until the machine is switched off, and what the disk holds then is
//! recovered and compared with what the threads had said.
//!
//! What is said, and what follows from it, is tested here on any machine. The feature `kernel-tests` adds the two
//! halves that `cargo harness test --lane kernel` runs in a virtual machine: `work`, during which the power goes,
//! and `check`, once for each disk that a cut could have left. `LOOPFS_TEST_XFS` is an XFS mounted with
//! `prjquota` and given to the test alone; `LOOPFS_TEST_SEED` is what `work` starts its choices from.

mod expected;
mod line;

#[cfg(feature = "kernel-tests")]
mod check;
#[cfg(feature = "kernel-tests")]
mod journal;
#[cfg(feature = "kernel-tests")]
mod work;

#[cfg(feature = "kernel-tests")]
fn xfs() -> std::path::PathBuf {
    let path = std::env::var_os("LOOPFS_TEST_XFS");
    path.expect("LOOPFS_TEST_XFS is not set: run `cargo harness test --lane kernel`").into()
}

#[cfg(feature = "kernel-tests")]
fn store() -> loopfs::volume_store::VolumeStore {
    loopfs::volume_store::VolumeStore::open(&xfs(), loopfs::volume_store::StoreOptions::default())
        .expect("the store")
}
