//! Tests of the driver's image in a Docker engine: its service, its messages if it lacks something, and its end. They need root
//! and an engine of their own on this machine; `cargo harness test --lane docker` provides both.
//!
//! The tests use one store, so they run one after the other (`--test-threads=1`). Each has volumes of its own.
//!
//! The engine has the image `loopfs:dev`. `LOOPFS_TEST_XFS` is an XFS mounted with `prjquota`, `LOOPFS_TEST_XFS_NOQUOTA`
//! one without. The tests fail if one of them is missing, because a skipped test must not look like a passed one.

mod container;
mod refusals;
mod service;
#[path = "../support/mod.rs"]
mod support;
