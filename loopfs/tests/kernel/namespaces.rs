//! Mount and user namespaces, and a `/dev` in which the kernel creates no nodes.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, SFlag, mknod};

use crate::environment::this_test_again;

/// A user without capabilities.
pub(crate) const NOBODY: u32 = 65534;
/// Set in the process that enters the user namespace. The value is a path for the test, such as that of an idmapped mount.
pub(crate) const TARGET: &str = "LOOPFS_TEST_IDMAPPED";
/// The line that the process prints once its ids are mapped.
pub(crate) const MAPPED: &str = "ids are mapped";

/// Runs `work` in a mount namespace that lasts as long as its thread.
pub(crate) fn in_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let apart = || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(apart).join().unwrap())
}

/// Runs `work` while a tmpfs covers `/dev` that has copies of the nodes whose names `copied` accepts, in a mount namespace that
/// lasts as long as its thread.
pub(crate) fn with_static_dev<T: Send>(
    copied: fn(&OsStr) -> bool,
    flags: MsFlags,
    work: impl FnOnce() -> T + Send,
) -> T {
    in_namespace(|| {
        let nodes: Vec<_> = std::fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap().path()).collect();
        let nodes = nodes.iter().filter(|path| copied(path.file_name().unwrap()));
        let nodes: Vec<_> = nodes.map(|path| (path, std::fs::symlink_metadata(path).unwrap())).collect();
        mount(Some("none"), "/dev", Some("tmpfs"), MsFlags::MS_NOSUID | flags, None::<&str>).unwrap();
        for (path, status) in nodes {
            let kind = match status.file_type() {
                kind if kind.is_char_device() => SFlag::S_IFCHR,
                kind if kind.is_block_device() => SFlag::S_IFBLK,
                _ => continue,
            };
            mknod(path, kind, Mode::from_bits_truncate(status.mode()), status.rdev()).unwrap();
        }
        work()
    })
}

/// A node in the machine's `/dev` that has another name until this is dropped, even if the test fails.
pub(crate) struct NodeAside {
    node: PathBuf,
    aside: PathBuf,
}

impl NodeAside {
    pub(crate) fn of(node: &Path) -> Self {
        let aside = node.with_extension("aside");
        std::fs::rename(node, &aside).unwrap();
        Self { node: node.to_owned(), aside }
    }
}

impl Drop for NodeAside {
    fn drop(&mut self) {
        if let Err(error) = std::fs::rename(&self.aside, &self.node) {
            eprintln!("rename {} to {}: {error}", self.aside.display(), self.node.display());
        }
    }
}

/// Accepts the nodes that a container without further devices has.
pub(crate) fn no_loop_nodes(name: &OsStr) -> bool {
    ["null", "zero", "full", "random", "urandom", "tty"].map(OsStr::new).contains(&name)
}

/// Starts the current test again, with a path in a variable, as a process with one thread and as the only process of a user
/// without capabilities. Only such a process may enter a user namespace.
pub(crate) fn alone_unprivileged<T>(variable: &str, path: &Path, start: impl FnOnce(&mut Command) -> T) -> T {
    // If the user may have only one process, libtest cannot start a thread for the test and runs it in its only thread.
    let (soft, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
    setrlimit(Resource::RLIMIT_NPROC, 1, hard).unwrap();
    let mut command = this_test_again(variable, path);
    let started = start(command.arg("--test-threads=1").uid(NOBODY).gid(NOBODY));
    setrlimit(Resource::RLIMIT_NPROC, soft, hard).unwrap();
    started
}

/// Starts the current test again in such a process, and waits until that has mapped its ids.
pub(crate) fn start_in_user_namespace(target: &Path) -> (Child, BufReader<impl Read + use<>>) {
    let mut child =
        alone_unprivileged(TARGET, target, |command| command.stdin(Stdio::piped()).spawn()).unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.trim_end().ends_with(MAPPED) {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "the process ended before its ids were mapped");
    }
    (child, output)
}
