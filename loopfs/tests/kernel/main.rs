//! Tests against the kernel: loop devices, mounts, XFS project quotas and the store. They need
//! root and a machine to themselves; `cargo harness test --lane kernel` gives them one.
//!
//! `LOOPFS_TEST_XFS` is an XFS mounted with `prjquota`, `LOOPFS_TEST_XFS_NOQUOTA` one without
//! quotas, `LOOPFS_TEST_SCRATCH` a tmpfs, `LOOPFS_TEST_TOOL` the program `loopfs`. Without them the
//! tests fail: a skipped test must not look like a passed one.

mod attachments;
mod clones;
mod command_line;
mod conditions;
mod directory_copies;
mod environment;
mod foreign_files;
mod growth;
mod in_use;
mod lock_timeouts;
mod loop_devices;
mod many_devices;
mod max_part;
mod module;
mod mounts;
mod other_programs;
mod project_ids;
mod project_trees;
mod quota_refusals;
mod quotas;
mod refusals;
mod settings;
mod snapshots;
mod space;
mod store;
mod store_crashes;
mod trash;
mod user_namespaces;
