//! Another program: it binds and detaches devices of its own with losetup(8) of util-linux or with single calls to the kernel, and
//! opens and mounts devices of the library.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use loopfs::loop_device::{Access, unmanaged};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::environment::path_from;

/// Binds a file to a device, the lowest free one if none is given. Returns `None` if the device is bound already.
pub(super) fn bind(file: &Path, read_only: bool, index: Option<u32>, losetup: bool) -> Option<u32> {
    if let Some(index) = index
        && let Err(error) = unmanaged::add(index)
    {
        assert_eq!(error.errno(), Some(libc::EEXIST), "{error}");
    }
    if losetup {
        let mut command = self::losetup();
        command.args(read_only.then_some("--read-only"));
        match index {
            Some(index) => command.arg(node(index)),
            None => command.args(["--find", "--show"]),
        };
        let output = command.arg(file).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let found = printed.trim_end().strip_prefix("/dev/loop").and_then(|index| index.parse().ok());
        return output.status.success().then(|| index.or(found)).flatten();
    }
    let index = match index {
        Some(index) => index,
        None => unmanaged::find_free().unwrap(),
    };
    let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
    let backing = File::options().read(true).write(!read_only).open(file).unwrap();
    let setup = unmanaged::Setup { access, ..Default::default() };
    let bound =
        unmanaged::Device::open_index(index, access).and_then(|device| device.set_up(&backing, &setup));
    bound.ok().map(|()| index)
}

/// Detaches a device of this program.
pub(super) fn unbind(index: u32, losetup: bool) {
    if losetup {
        let output = self::losetup().arg("--detach").arg(node(index)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    } else {
        unmanaged::Device::open_index(index, Access::ReadOnly).and_then(|device| device.detach()).unwrap();
    }
}

fn losetup() -> Command {
    Command::new(path_from("LOOPFS_TEST_LOSETUP"))
}

fn node(index: u32) -> PathBuf {
    format!("/dev/loop{index}").into()
}

/// What another program keeps open, until this is dropped.
#[derive(Debug)]
pub(super) enum Hold {
    Descriptor { _file: File },
    Mount { target: PathBuf },
}

impl Hold {
    pub(super) fn open(index: u32) -> Self {
        Self::Descriptor { _file: File::open(node(index)).unwrap() }
    }

    /// Mounts a device. Returns `None` if it has no file system that can be mounted from it.
    pub(super) fn mount(index: u32, read_only: bool, target: PathBuf) -> Option<Self> {
        let (flags, options) =
            if read_only { (MsFlags::MS_RDONLY, "nouuid,norecovery") } else { (MsFlags::empty(), "nouuid") };
        mount(Some(&node(index)), &target, Some("xfs"), flags, Some(options)).ok()?;
        Some(Self::Mount { target })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Self::Mount { target } = self
            && let Err(errno) = umount2(target.as_path(), MntFlags::empty())
        {
            eprintln!("unmount {}: {errno}", target.display());
        }
    }
}
