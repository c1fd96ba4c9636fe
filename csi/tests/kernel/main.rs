//! Tests of the driver on a real kernel: mounts, loop devices and a real XFS with project quotas. They need root and a
//! machine of their own; `cargo harness test --lane kernel` provides it.
//!
//! `LOOPFS_TEST_XFS` is an XFS mounted with `prjquota`, and `LOOPFS_TEST_SCRATCH` is a tmpfs. The tests fail if one of
//! them is missing, because a skipped test must not look like a passed one.

mod block;
mod block_access;
mod block_writes;
mod calls_in_progress;
mod control;
mod controller;
#[path = "../../../loopfs/tests/kernel/difference.rs"]
mod difference;
mod driver_process;
mod fixture;
mod health;
mod left_behind;
mod metrics;
mod mount;
mod propagation;
mod restart;
mod restart_storm;
mod rpc_table;
mod scratch_disk;
mod secrets;
mod settings;
mod snapshots;
mod static_dev;
mod storage;
mod storage_failure;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod volume_mounts;
