//! What an attacker tries who controls a container of the driver. Root succeeds in each attack on the node. The attack repairs what it
//! changes, except for mounts: root needs a mount namespace for it.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::ptrace;
use nix::sys::signal::kill;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;

use crate::volume::{Checked, named};

/// The copy beside the program that is owned by root and has the set-user-ID bit.
const AS_ROOT: &str = "as-root";
/// The file beside the program that only root may read. Others need the capability CAP_DAC_READ_SEARCH, as they do for
/// open_by_handle_at(2).
const SECRET: &str = "secret";
/// A directory in which every user can create files, in any container and on the node.
const SHARED_MEMORY: &str = "/dev/shm";
/// A directory on which file systems are mounted. It exists in any container.
const MOUNT_POINT: &str = "/dev";
/// The number of the loop devices' driver in the kernel.
const LOOP_MAJOR: u64 = 7;
const DRIVER: &str = "loopfs-csi";

/// Tries each attack and prints its outcome, `succeeded: ATTACK` or `denied: ATTACK: REASON`.
pub(crate) fn run([volume, kubelet, socket]: [&Path; 3]) -> Checked {
    let program = std::env::current_exe().map_err(|e| named("find this program's own file", e))?;
    let beside = |name: &str| program.with_file_name(name);
    report("write to the root file system", create(&beside("written")));
    report("read a file of root", File::open(beside(SECRET)).map(drop));
    report("run a program as root", run_as_root(&beside(AS_ROOT)));
    for (name, directory) in [("the volume of a tenant", volume), ("the kubelet's directory", kubelet)] {
        report(&format!("list {name}"), fs::read_dir(directory).map(drop));
        report(&format!("write to {name}"), create(&directory.join("attack")));
    }
    report("create a device node", create_device(&Path::new(SHARED_MEMORY).join("attack")));
    report("send a signal to the driver", driver().and_then(|driver| Ok(kill(driver, None)?)));
    let trace = |driver| Ok(ptrace::seize(driver, ptrace::Options::empty())?);
    report("trace the driver", driver().and_then(trace));
    report("connect to the socket of the Node service", UnixStream::connect(socket).map(drop));
    // The last attacks: these mounts hide other directories.
    report("mount a file system", mount_file_system());
    report("mount in a user namespace", mount_in_user_namespace());
    Ok(())
}

fn report<E: std::fmt::Display>(attack: &str, outcome: Result<(), E>) {
    match outcome {
        Ok(()) => println!("succeeded: {attack}"),
        Err(reason) => println!("denied: {attack}: {reason}"),
    }
}

fn create(path: &Path) -> std::io::Result<()> {
    File::create_new(path)?;
    fs::remove_file(path)
}

/// Runs the copy of this program that has the set-user-ID bit, which prints its user.
fn run_as_root(program: &Path) -> Checked {
    let output = Command::new(program).args(["read", "/proc/self/status"]).output()?;
    require_root(&String::from_utf8(output.stdout)?)
}

fn require_root(status: &str) -> Checked {
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1));
    let user = user.ok_or_else(|| format!("it does not print its user: {status}"))?;
    if user == "0" { Ok(()) } else { Err(format!("its effective user is {user}").into()) }
}

fn create_device(path: &Path) -> Checked {
    mknod(path, SFlag::S_IFBLK, Mode::S_IRUSR, makedev(LOOP_MAJOR, 0))?;
    Ok(fs::remove_file(path)?)
}

/// Returns the first process that runs the driver's program.
fn driver() -> Checked<Pid> {
    let name = |process: &Path| fs::read_to_string(process.join("comm")).unwrap_or_default();
    let processes = fs::read_dir("/proc")?.flatten().map(|entry| entry.path());
    let mut drivers = processes.filter(|process| name(process).trim_end() == DRIVER);
    let driver: PathBuf = drivers.next().ok_or(format!("there is no process {DRIVER}"))?;
    let id = driver.file_name().and_then(|id| id.to_str()?.parse().ok());
    Ok(Pid::from_raw(id.ok_or(format!("{} is no process", driver.display()))?))
}

fn mount_file_system() -> nix::Result<()> {
    mount(Some("tmpfs"), MOUNT_POINT, Some("tmpfs"), MsFlags::empty(), None::<&str>)
}

/// Mounts all that this process sees once more, as root of a user namespace.
fn mount_in_user_namespace() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
    mount(Some("/"), MOUNT_POINT, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attack succeeds only if the program reports that it runs as root. No program is started here: another test executes a file that
    /// it has written (ETXTBSY).
    #[test]
    fn program_printing_no_user_is_refused() {
        let error = require_root("read /proc/self/status\n").unwrap_err().to_string();
        assert!(error.contains("read /proc/self/status"), "{error}");
    }
}
