//! `loopfs losetup` compared with losetup(8) of util-linux: each command runs through both programs, in the same state.
//!
//! `LOOPFS_TEST_LOSETUP` is the program of util-linux. If it is not set, the tests use the one in `PATH`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use loopfs::loop_device::{LoopControl, unmanaged};
use nix::mount::MsFlags;
use nix::sys::stat::{Mode, SFlag, mknod};

use crate::environment::{Leaks, directory, image, linux_at_least, path_from};
use crate::namespaces::{no_loop_nodes, with_static_dev};

/// Reports that the calling test cannot check anything here, which `harness/skips.toml` has to permit. The test then returns.
#[allow(clippy::explicit_write, reason = "libtest discards the output of println! if a test passes")]
fn report_skip(reason: &str) {
    // In a line of its own, because the name of the test is at the beginning of this one.
    writeln!(std::io::stdout(), "\nthis test is skipped: {reason}").expect("write to the log");
}

/// A losetup program.
struct Program {
    path: PathBuf,
    /// The version of util-linux, as `(2, 41)`, or `None` for this program.
    version: Option<(u32, u32)>,
}

impl Program {
    fn ours() -> Self {
        Self { path: path_from("LOOPFS_TEST_TOOL"), version: None }
    }

    fn of_util_linux() -> Option<Self> {
        let path = std::env::var_os("LOOPFS_TEST_LOSETUP").map_or_else(|| "losetup".into(), PathBuf::from);
        let output = Command::new(&path).arg("--version").output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let mut numbers = text.trim_end().strip_prefix("losetup from util-linux ")?.split(['.', '-']);
        let version = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        Some(Self { path, version: Some(version) })
    }

    fn run(&self, directory: &Path, args: &[&str]) -> Output {
        let mut command = Command::new(&self.path);
        command.arg0("losetup").args(args).current_dir(directory).env("LC_ALL", "C");
        command.output().unwrap_or_else(|error| panic!("{}: {error}", self.path.display()))
    }
}

/// Detaches every device of the files in a directory, also if the test fails.
struct Detached(tempfile::TempDir);

impl Detached {
    fn detach(&self) {
        let directory = self.0.path().to_path_buf();
        for index in unmanaged::bound_indices().unwrap_or_default() {
            let path = unmanaged::attributes(index).backing_path;
            if path.is_some_and(|path| path.starts_with(&directory)) {
                let device = unmanaged::Device::open_index(index, loopfs::loop_device::Access::ReadOnly);
                drop(device.and_then(|device| device.detach()));
            }
        }
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        self.detach();
    }
}

/// The files that the commands use.
fn files() -> Detached {
    let directory = directory();
    for (name, size) in
        [("a.img", 1 << 20), ("b.img", 8 << 20), ("x y.img", 1 << 20), ("short", 100), ("odd", 1000)]
    {
        File::create(directory.path().join(name)).unwrap().set_len(size).unwrap();
    }
    Detached(directory)
}

/// The commands. In an argument, `{0}` is the number of the first free device when the script begins, `{1}` that of the second, and
/// so on. The version is the oldest one of util-linux with this behaviour.
const SCRIPT: &[((u32, u32), &[&str])] = &[
    ((2, 38), &["-a"]),
    ((2, 38), &["-J"]),
    ((2, 38), &["-j", "a.img"]),
    ((2, 38), &["-j", "missing"]),
    ((2, 38), &["-f"]),
    ((2, 38), &["/dev/loop{0}"]),
    ((2, 38), &["-l", "/dev/loop{0}"]),
    ((2, 38), &["-d", "/dev/loop{0}"]),
    ((2, 38), &["-c", "/dev/loop{0}"]),
    ((2, 38), &["-b", "512", "/dev/loop{0}"]),
    ((2, 38), &["--direct-io=on", "/dev/loop{0}"]),
    ((2, 41), &["-d", "/dev/null"]),
    ((2, 41), &["-d", "nosuch"]),
    ((2, 41), &["/dev/nosuch"]),
    ((2, 38), &["/dev/null", "a.img"]),
    ((2, 38), &["-f", "missing"]),
    ((2, 41), &["/dev/loop{0}", "missing"]),
    ((2, 38), &["-b", "1000", "-f", "a.img"]),
    // Errors of the command line.
    ((2, 38), &["-x"]),
    ((2, 38), &["--bogus"]),
    ((2, 38), &["--de"]),
    ((2, 38), &["--o"]),
    ((2, 38), &["--show=3"]),
    ((2, 38), &["--offset"]),
    ((2, 38), &["-o"]),
    ((2, 38), &["-d"]),
    ((2, 38), &["-o", "x", "-f", "a.img"]),
    ((2, 38), &["-o=5", "-f", "a.img"]),
    ((2, 38), &["-a=3"]),
    ((2, 38), &["--re", "-a"]),
    ((2, 38), &["-o", "16E", "-f", "a.img"]),
    ((2, 38), &["--sizelimit", "1B", "-f", "a.img"]),
    ((2, 38), &["-b", "", "-f", "a.img"]),
    ((2, 38), &["--direct-io=foo", "-a"]),
    ((2, 38), &["--json", "--raw"]),
    ((2, 38), &["-f", "-D"]),
    ((2, 38), &["-a", "-j", "a.img"]),
    ((2, 38), &["-O", "FOO"]),
    ((2, 38), &["-O", "NAME,,RO"]),
    ((2, 38), &["-n"]),
    ((2, 38), &["-r", "-a"]),
    ((2, 38), &["-o", "1", "-a"]),
    ((2, 38), &["-f", "a.img", "b.img", "x y.img"]),
    // Devices.
    ((2, 38), &["-f", "--show", "b.img"]),
    ((2, 38), &["-f", "--show", "-r", "-o", "4K", "--sizelimit", "8192", "x y.img"]),
    ((2, 38), &["/dev/loop{0}", "a.img"]),
    ((2, 38), &["-a"]),
    ((2, 38), &[]),
    ((2, 38), &["--list", "--json"]),
    ((2, 38), &["--raw"]),
    ((2, 38), &["-Ja"]),
    ((2, 41), &["--output-all"]),
    ((2, 41), &["--raw", "--output-all"]),
    ((2, 41), &["-J", "--output-all"]),
    ((2, 38), &["-O", "NAME,BACK-FILE,RO"]),
    ((2, 41), &["-n", "-O", "name,RO"]),
    ((2, 41), &["-O", "+REF"]),
    ((2, 38), &["/dev/loop{0}"]),
    ((2, 41), &["-l", "loop{1}"]),
    ((2, 38), &["--raw", "-l", "/dev/loop{1}"]),
    ((2, 38), &["-j", "b.img"]),
    ((2, 38), &["-j", "b.img", "-o", "1"]),
    ((2, 38), &["-j", "x y.img", "-o", "4096", "-J", "-l"]),
    ((2, 38), &["-f", "--show", "-L", "b.img"]),
    ((2, 38), &["-f", "-L", "x y.img"]),
    ((2, 38), &["-f", "-L", "-o", "4096", "--sizelimit", "8192", "x y.img"]),
    ((2, 38), &["-L", "/dev/loop{2}", "b.img"]),
    ((2, 38), &["-b", "4096", "/dev/loop{0}"]),
    ((2, 38), &["--direct-io=on", "/dev/loop{0}"]),
    ((2, 38), &["-l", "/dev/loop{0}"]),
    ((2, 38), &["--direct-io=off", "/dev/loop{0}"]),
    ((2, 38), &["-c", "/dev/loop{0}"]),
    ((2, 40), &["-P", "-f", "--show", "--loop-ref", "abc", "--direct-io", "a.img"]),
    ((2, 40), &["-O", "NAME,REF,PARTSCAN,DIO", "-j", "a.img"]),
    ((2, 40), &["-d", "/dev/loop{2}"]),
    ((2, 41), &["-f", "--show", "short"]),
    ((2, 41), &["-d", "/dev/loop{2}"]),
    ((2, 41), &["-f", "--show", "odd"]),
    ((2, 41), &["-d", "/dev/loop{2}"]),
    ((2, 38), &["-d", "/dev/loop{0}", "/dev/loop{1}"]),
    ((2, 38), &["-d", "/dev/loop{0}"]),
    ((2, 38), &["-a"]),
];

/// Returns `count` devices that are bound to no file, and leaves them so.
fn free_devices(count: usize) -> Vec<u32> {
    let directory = files();
    let file = File::options().read(true).write(true).open(directory.0.path().join("a.img")).unwrap();
    let mut indices = Vec::new();
    while indices.len() < count {
        let index = unmanaged::find_free().unwrap();
        let device = unmanaged::Device::open_index(index, loopfs::loop_device::Access::ReadWrite).unwrap();
        device.set_up(&file, &unmanaged::Setup::default()).unwrap();
        indices.push(index);
    }
    indices
}

/// Runs the script and returns the result of each command, with the directory and the inode numbers replaced.
fn results(program: &Program, up_to: (u32, u32), free: &[u32], directory: &Detached) -> Vec<String> {
    let path = directory.0.path().canonicalize().unwrap();
    let inode =
        |name: &str| std::os::unix::fs::MetadataExt::ino(&path.join(name).metadata().unwrap()).to_string();
    let inodes = ["a.img", "b.img", "x y.img", "short", "odd"].map(|name| (name, inode(name)));
    let run = |(_, args): &(_, &[&str])| {
        let number = |arg: &&str| {
            let replaced = free.iter().enumerate();
            replaced.fold((*arg).to_owned(), |arg, (place, index)| {
                arg.replace(&format!("{{{place}}}"), &index.to_string())
            })
        };
        let args: Vec<String> = args.iter().map(number).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = program.run(&path, &args);
        let text = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes).replace(path.to_str().unwrap(), "/directory");
            inodes.iter().fold(text, |text, (name, inode)| text.replace(inode, &format!("<{name}>")))
        };
        let code = output.status.code();
        format!("losetup {args:?}\n{}{}exit code {code:?}", text(&output.stdout), text(&output.stderr))
    };
    let results = SCRIPT.iter().filter(|(since, _)| *since <= up_to).map(run).collect();
    directory.detach();
    results
}

#[test]
fn each_command_behaves_like_util_linux() {
    let free = free_devices(3);
    // The same files for both, because the width of a column depends on the inode numbers.
    let directory = files();
    let Some(util_linux) = Program::of_util_linux() else {
        return report_skip("there is no losetup of util-linux: set LOOPFS_TEST_LOSETUP");
    };
    let version = util_linux.version.unwrap_or((2, 41));
    let theirs = results(&util_linux, version, &free, &directory);
    let ours = results(&Program::ours(), version, &free, &directory);
    println!("{} of {} commands compared with util-linux {version:?}", theirs.len(), SCRIPT.len());
    for (theirs, ours) in theirs.iter().zip(&ours) {
        assert_eq!(ours, theirs);
    }
}

/// The list follows each change of the devices.
#[test]
fn other_programs_devices_are_found() {
    let directory = files();
    let path = directory.0.path();
    let ours = Program::ours();
    let open = |name: &str| File::options().read(true).write(true).open(path.join(name)).unwrap();
    let bind = |name: &str, access| {
        let index = unmanaged::find_free().unwrap();
        let device = unmanaged::Device::open_index(index, loopfs::loop_device::Access::ReadWrite).unwrap();
        device.set_up(open(name), &unmanaged::Setup { access, ..unmanaged::Setup::default() }).unwrap();
        index
    };
    let found = |name: &str| {
        let output = ours.run(path, &["-n", "-O", "NAME", "-j", name]);
        assert!(output.status.success(), "{output:?}");
        let mut names: Vec<String> =
            String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
        names.sort();
        names
    };
    let node = |index: u32| format!("/dev/loop{index}");
    use loopfs::loop_device::Access::{ReadOnly, ReadWrite};
    assert!(found("a.img").is_empty());
    let (one, two) = (bind("a.img", ReadWrite), bind("a.img", ReadOnly));
    let other = bind("b.img", ReadWrite);
    let mut both = vec![node(one), node(two)];
    both.sort();
    assert_eq!(found("a.img"), both);
    assert_eq!(found("b.img"), [node(other)]);
    // The same index for another file.
    unmanaged::Device::open_index(one, ReadOnly).unwrap().detach().unwrap();
    assert_eq!(found("a.img"), [node(two)]);
    assert_eq!(bind("b.img", ReadWrite), one);
    assert_eq!(found("a.img"), [node(two)]);
    let mut both = vec![node(one), node(other)];
    both.sort();
    assert_eq!(found("b.img"), both);
    drop(directory);
}

/// util-linux must not detach the devices of other programs, so this test needs a machine of its own: the guest, where
/// `LOOPFS_TEST_LOSETUP` is set.
#[test]
fn detach_all_behaves_like_util_linux() {
    if std::env::var_os("LOOPFS_TEST_LOSETUP").is_none() {
        return report_skip("LOOPFS_TEST_LOSETUP is not set");
    }
    let directory = files();
    let path = directory.0.path();
    let result_of = |program: &Program| {
        let text = |args: &[&str]| {
            let output = program.run(path, args);
            let bytes = [output.stdout, output.stderr].concat();
            format!("{:?}\n{}", output.status.code(), String::from_utf8_lossy(&bytes))
        };
        let none_bound = text(&["-D"]);
        let devices: Vec<String> = (["a.img", "b.img", "x y.img"].iter())
            .map(|file| String::from_utf8(program.run(path, &["-f", "--show", file]).stdout).unwrap())
            .collect();
        let user = File::open(devices[1].trim()).unwrap();
        let all = text(&["-D"]);
        let in_use = text(&["-n", "-O", "AUTOCLEAR,BACK-FILE"]);
        drop(user);
        [none_bound, devices.concat(), all, in_use, text(&["-a"])]
    };
    let util_linux = Program::of_util_linux().expect("the guest has util-linux");
    let theirs = result_of(&util_linux);
    let ours = result_of(&Program::ours());
    assert_eq!(ours, theirs);
    assert_eq!(ours[2], "Some(0)\n");
    assert!(
        ours[3].starts_with("Some(0)\n") && ours[3].contains("1 ") && ours[3].contains("b.img"),
        "{ours:?}"
    );
    assert!(!ours[3].contains("a.img"), "{ours:?}");
    assert_eq!(ours[4], "Some(0)\n");
}

/// `--remove` is new in util-linux 2.42. If the program of util-linux is older, this test checks the documented behaviour of this
/// program alone: losetup(8) of 2.42 prints nothing for a removed device, and a message for each other one.
#[test]
fn remove_removes_only_unbound_devices() {
    let directory = files();
    let path = directory.0.path();
    let result_of = |program: &Program| {
        let free = free_devices(2);
        let [bound, unbound] = [free[0], free[1]].map(|index| format!("/dev/loop{index}"));
        let bind = program.run(path, &[&bound, "a.img"]);
        assert!(bind.status.success(), "{bind:?}");
        let outputs = [
            program.run(path, &["--remove", &unbound]),
            program.run(path, &["--remove", &unbound, &bound]),
            program.run(path, &["--remove"]),
        ];
        assert!(!Path::new(&format!("/sys/block/loop{}", free[1])).exists());
        assert_eq!(
            unmanaged::attributes(free[0]).backing_path,
            Some(path.canonicalize().unwrap().join("a.img"))
        );
        directory.detach();
        outputs.map(|output| {
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8(text).unwrap().replace(&bound, "BOUND").replace(&unbound, "UNBOUND");
            format!("{:?}\n{text}", output.status.code())
        })
    };
    let ours = result_of(&Program::ours());
    assert_eq!(
        ours,
        [
            "Some(0)\n",
            "Some(1)\nlosetup: UNBOUND: remove failed: No such device\nlosetup: BOUND: remove failed: Device or resource busy\n",
            "Some(1)\nlosetup: no loop device specified\n",
        ]
    );
    if let Some(util_linux) = Program::of_util_linux().filter(|program| program.version >= Some((2, 42))) {
        assert_eq!(ours, result_of(&util_linux));
    }
}

/// A pod has the node of its device at a path of its own.
#[test]
fn removing_a_bound_device_fails() {
    const NODE: &str = "losetup-test-node";
    let directory = files();
    let path = directory.0.path();
    assert!(Program::ours().run(path, &["-f", "a.img"]).status.success());
    let image = File::open(path.join("a.img")).unwrap();
    let devices = || LoopControl::open().unwrap().find(&image).unwrap();
    let number = devices()[0].device_number().unwrap().to_raw();
    let node = Path::new("/dev").join(NODE);
    mknod(&node, SFlag::S_IFBLK, Mode::S_IRUSR | Mode::S_IWUSR, number).unwrap();
    let output = Program::ours().run(path, &["--remove", NODE]);
    std::fs::remove_file(&node).unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(devices().len(), 1);
    drop(directory);
}

/// From Linux 6.15 on, `LOOP_CONFIGURE` sends a uevent, on which `Attachments` relies.
#[test]
fn binding_a_device_sends_a_uevent() {
    if !linux_at_least(6, 15) {
        return report_skip("LOOP_CONFIGURE sends no uevent before Linux 6.15");
    }
    let directory = files();
    let count = || std::fs::read_to_string("/sys/kernel/uevent_seqnum").unwrap();
    let before = count();
    let output = Program::ours().run(directory.0.path(), &["-f", "a.img"]);
    assert!(output.status.success(), "{output:?}");
    assert_ne!(count(), before);
    drop(directory);
}

#[test]
fn a_missing_node_is_created() {
    let _leaks = Leaks::watch();
    let directory = directory();
    drop(image(directory.path(), "image", 1 << 20));
    let file = directory.path().join("image");
    let tool = path_from("LOOPFS_TEST_TOOL");
    with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        let run = |args: &[&OsStr]| Command::new(&tool).arg("losetup").args(args).output().unwrap();
        let set_up = run(&["-f".as_ref(), "--show".as_ref(), file.as_ref()]);
        assert!(set_up.status.success(), "{set_up:?}");
        let device = String::from_utf8(set_up.stdout).unwrap();
        assert!(Path::new(device.trim()).exists(), "{device}");
        let detached = run(&["-d".as_ref(), device.trim().as_ref()]);
        assert!(detached.status.success(), "{detached:?}");
    });
}
