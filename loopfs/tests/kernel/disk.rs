//! A disk: a sparse image behind a loop device, which is a disk like any other to the kernel.
//!
//! `LOOPFS_TEST_MKFS_XFS` is the program mkfs.xfs.
#![allow(dead_code, reason = "the tests of the library and those of the tool use a part each")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use loopfs::loop_device::{Access, unmanaged};
use nix::mount::{MsFlags, mount};

use crate::environment::{MIB, directory, path_from};

/// The smallest disk that mkfs.xfs formats.
pub(crate) const MIN_SIZE: u64 = 300 * MIB;

pub(crate) struct Disk {
    device: unmanaged::Device,
    pub(crate) path: PathBuf,
    image: tempfile::TempDir,
}

impl Disk {
    pub(crate) fn blank(size: u64) -> Self {
        let image = directory();
        let file =
            File::options().read(true).write(true).create_new(true).open(image.path().join("disk")).unwrap();
        file.set_len(size).unwrap();
        Self::attach(image, &file, Access::ReadWrite)
    }

    /// A disk with an XFS that takes all of it.
    pub(crate) fn formatted(size: u64) -> Self {
        let disk = Self::blank(size);
        mkfs(&[], &disk.path);
        disk
    }

    /// A disk with an XFS that takes no writes.
    pub(crate) fn write_protected() -> Self {
        let writable = Self::formatted(MIN_SIZE);
        let image = directory();
        fs::rename(writable.image.path().join("disk"), image.path().join("disk")).unwrap();
        let file = File::open(image.path().join("disk")).unwrap();
        Self::attach(image, &file, Access::ReadOnly)
    }

    fn attach(image: tempfile::TempDir, file: &File, access: Access) -> Self {
        let index = unmanaged::find_free().unwrap();
        let device = unmanaged::Device::open_index(index, access).unwrap();
        device.set_up(file, &unmanaged::Setup { access, ..Default::default() }).unwrap();
        Self { device, path: format!("/dev/loop{index}").into(), image }
    }

    /// Mounts the XFS with project quotas.
    pub(crate) fn mount(&self, directory: &Path) {
        let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        mount(Some(&self.path), directory, Some("xfs"), flags, Some("prjquota")).unwrap();
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        file.sync_all().unwrap();
    }

    pub(crate) fn grow(&self, size: u64) {
        File::options().write(true).open(self.image.path().join("disk")).unwrap().set_len(size).unwrap();
        self.device.refresh_capacity().unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = self.device.detach() {
            eprintln!("{error}");
        }
    }
}

pub(crate) fn mkfs(options: &[&str], device: &Path) {
    let output = Command::new(path_from("LOOPFS_TEST_MKFS_XFS"))
        .arg("-q")
        .args(options)
        .arg(device)
        .output()
        .expect("mkfs.xfs runs");
    assert!(output.status.success(), "{output:?}");
}
