//! The program that runs as PID 1 in a test virtual machine, and the protocol between host and guest.
//!
//! [`spec`] specifies the work of a guest, [`report`] its messages, and [`control`] the requests to it while
//! it runs. The other modules are the program itself, which `src/bin/guest-init.rs` starts. `src/bin/pause.rs`
//! is the program that holds the namespaces of a pod.
//!
//! The guest finds its disks by virtio-blk serial numbers, and its two virtio ports by their names. It therefore works with
//! any host that writes the specification; that of this workspace is `testvm`. A host puts the program `guest-init` at `/init` of an
//! initramfs, and the specification at [`spec::SPEC_PATH`].
//!
//! The crate has no async runtime: both programs are built static, and one of them is in every initramfs. The
//! host links to the crate for the types of the protocol.
//!
//! ```
//! use std::time::Duration;
//! use testvm_guest::spec::{BootSpec, Mode, TestBinary, TestsSpec};
//!
//! // One boot: run /tests/quota as root, then report its result and power off.
//! let quota = TestBinary {
//!     name: "quota".into(),
//!     path: "/tests/quota".into(),
//!     args: Vec::new(),
//!     timeout: Duration::from_secs(60),
//!     ..TestBinary::default()
//! };
//! let mode = Mode::Tests(TestsSpec { binaries: vec![quota], ..TestsSpec::default() });
//! let spec = BootSpec { modules: Vec::new(), unix_time: 0, mode };
//! let file = serde_json::to_string(&spec).unwrap();
//! assert_eq!(serde_json::from_str::<BootSpec>(&file).unwrap(), spec);
//! ```

pub mod control;
pub mod report;
pub mod spec;

mod children;
mod devices;
mod init;
mod kernel_log;
mod log_file;
mod modprobe;
mod mounts;
mod node;
mod reporter;
mod requests;
mod services;
mod tests;
mod xfs;

pub use init::main;
