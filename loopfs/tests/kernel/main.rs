//! Tests against the kernel: loop devices, mounts, XFS project quotas and the store. They need root and a
//! machine of their own; `cargo harness test --lane kernel` provides it.
//!
//! `LOOPFS_TEST_XFS` is an XFS mounted with `prjquota`, `LOOPFS_TEST_XFS_NOQUOTA` is one without quotas,
//! `LOOPFS_TEST_SCRATCH` is a tmpfs, `LOOPFS_TEST_TOOL` is the program `loopfs`, whose losetup `detach` compares with the calls of the
//! library, and `LOOPFS_TEST_EXAMPLES` is a directory with the programs of `examples`. The tests fail if one of them is missing,
//! because a skipped test must not look like a passed one. The tests of the tool include some modules of this directory.

mod annotations;
mod attachments;
mod clones;
mod conditions;
mod cookbook;
mod detach;
mod device_cgroup;
mod difference;
mod directory_copies;
mod disk;
mod environment;
mod failure;
mod fixtures;
mod foreign_files;
mod foreign_projects;
mod in_use;
mod inode_space;
mod limited_directories;
mod lock_timeouts;
mod loop_device_model;
mod loop_devices;
mod many_devices;
mod max_part;
mod module;
mod mounts;
mod namespaces;
mod other_programs;
mod project_ids;
mod project_trees;
mod publishing;
mod quota_refusals;
mod quotas;
mod refusals;
mod settings;
mod snapshots;
mod space;
mod static_dev;
mod store;
mod store_crashes;
mod store_model;
mod trash;
mod user_namespaces;
