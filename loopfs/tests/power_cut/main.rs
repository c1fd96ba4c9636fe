//! Tests of power cuts: threads change the store until the machine is switched off. Then the store on the
//! disk is recovered and compared with the lines that the threads wrote.
//!
//! The format of the lines and the state expected from them are tested here on any machine. The feature
//! `__tests` adds the two halves that `cargo harness test --lane kernel` runs in a virtual machine:
//! `work`, during which the power is cut, and `check`, once for each disk that a cut could have left.
//! `LOOPFS_TEST_XFS` is an XFS mounted with `prjquota` and used by this test alone. `LOOPFS_TEST_SEED` is the
//! seed of the random choices of `work`.

mod expected;
mod line;

#[cfg(feature = "__tests")]
mod check;
#[cfg(feature = "__tests")]
mod journal;
#[cfg(feature = "__tests")]
mod work;

#[cfg(feature = "__tests")]
fn xfs() -> std::path::PathBuf {
    let path = std::env::var_os("LOOPFS_TEST_XFS");
    path.expect("LOOPFS_TEST_XFS is not set: run `cargo harness test --lane kernel`").into()
}

#[cfg(feature = "__tests")]
fn store() -> loopfs::volume_store::VolumeStore {
    loopfs::volume_store::VolumeStore::open(&xfs(), loopfs::volume_store::StoreOptions::default())
        .expect("the store")
}
