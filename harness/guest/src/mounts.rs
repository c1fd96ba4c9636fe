//! Mounts the file systems of the guest: the standard ones, those of the specification, and the root.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, chroot};

use super::devices;
use super::spec::{Mount, Source};

const HARDENED: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// Mounts proc, sys and dev, and the other file systems that programs expect.
pub(super) fn mount_system() -> Result<()> {
    mount_early()?;
    let no_devices = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let no_programs = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    system("devpts", "/dev/pts", no_programs, "mode=0620,ptmxmode=0666,gid=5")?;
    system("tmpfs", "/dev/shm", no_devices, "mode=1777")?;
    system("cgroup2", "/sys/fs/cgroup", HARDENED, "nsdelegate")?;
    system("tmpfs", "/run", no_devices, "mode=0755")?;
    system("tmpfs", "/tmp", no_devices, "mode=1777")?;
    for (name, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        let link = format!("/dev/{name}");
        if fs::symlink_metadata(&link).is_err() {
            symlink(target, &link).with_context(|| format!("link {link}"))?;
        }
    }
    Ok(())
}

/// Mounts the file systems that are needed to find devices.
pub(super) fn mount_early() -> Result<()> {
    system("proc", "/proc", HARDENED, "")?;
    system("sysfs", "/sys", HARDENED, "")?;
    system("devtmpfs", "/dev", MsFlags::MS_NOSUID, "mode=0755")
}

/// Unmounts the file systems of [`mount_early`].
pub(super) fn unmount_early() -> Result<()> {
    for target in ["/dev", "/sys", "/proc"] {
        umount2(target, MntFlags::MNT_DETACH).with_context(|| format!("unmount {target}"))?;
    }
    Ok(())
}

fn system(fs_type: &str, target: &str, flags: MsFlags, data: &str) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("create {target}"))?;
    mount(Some(fs_type), target, Some(fs_type), flags, Some(data))
        .with_context(|| format!("mount {fs_type} on {target}"))
}

/// Mounts a file system of the specification.
pub(super) fn mount_spec(spec: &Mount) -> Result<()> {
    fs::create_dir_all(&spec.target).with_context(|| format!("create {}", spec.target))?;
    let source = match &spec.source {
        Source::Disk(name) => devices::disk(name)?,
        Source::Name(name) => name.into(),
        Source::Directory(directory) => return bind(directory, &spec.target, &spec.options),
    };
    let (flags, data) = options(&spec.options);
    mount(Some(&source), spec.target.as_str(), Some(spec.fs_type.as_str()), flags, Some(data.as_str()))
        .with_context(|| {
            format!("mount {} ({}) on {} with {}", source.display(), spec.fs_type, spec.target, spec.options)
        })
}

/// Mounts a directory at `target` with exactly these flags, whatever those of its file system's mount are.
fn bind(directory: &str, target: &str, flags: &str) -> Result<()> {
    let described = || format!("bind-mount {directory} on {target} with {flags}");
    let (flags, data) = options(flags);
    anyhow::ensure!(data.is_empty(), "{}: a bind mount has no option {data}", described());
    fs::create_dir_all(directory).with_context(|| format!("create {directory}"))?;
    mount(Some(directory), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).with_context(described)?;
    let change =
        |flags| mount(None::<&str>, target, None::<&str>, flags, None::<&str>).with_context(described);
    change(MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags)?;
    // The new mount is a peer of the mount that it was made from. A peer group of its own keeps mounts below the target
    // out of `directory`.
    change(MsFlags::MS_PRIVATE)?;
    change(MsFlags::MS_SHARED)
}

/// Unmounts a file system, lazily (`MNT_DETACH`) if it is busy, because the machine is about to end.
pub(super) fn unmount(target: &str) -> Result<()> {
    match umount2(target, MntFlags::empty()) {
        Err(nix::errno::Errno::EBUSY) => umount2(target, MntFlags::MNT_DETACH),
        result => result,
    }
    .with_context(|| format!("unmount {target}"))
}

/// Returns the mount points of all file systems of this type, the newest first.
pub(super) fn of_type(fs_type: &str) -> Result<Vec<String>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("read the mounts")?;
    Ok(mount_points(&mounts, fs_type).into_iter().rev().map(str::to_owned).collect())
}

/// Returns the mount points of this type in `/proc/self/mountinfo` (proc(5)).
fn mount_points<'a>(mountinfo: &'a str, fs_type: &str) -> Vec<&'a str> {
    let of_type = mountinfo.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        file_system.strip_prefix(fs_type)?.starts_with(' ').then(|| mount.split(' ').nth(4))?
    });
    of_type.collect()
}

/// Splits fstab options into mount flags and options that are passed to the file system.
fn options(text: &str) -> (MsFlags, String) {
    let mut flags = MsFlags::empty();
    let mut data = Vec::new();
    for option in text.split(',').filter(|option| !option.is_empty()) {
        match option {
            "defaults" | "rw" => {}
            "ro" => flags |= MsFlags::MS_RDONLY,
            "nosuid" => flags |= MsFlags::MS_NOSUID,
            "nodev" => flags |= MsFlags::MS_NODEV,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "relatime" => flags |= MsFlags::MS_RELATIME,
            other => data.push(other),
        }
    }
    (flags, data.join(","))
}

/// Makes the file system of a disk the root of PID 1 and of all processes that it starts.
pub(super) fn switch_root(disk: &str) -> Result<()> {
    const NEW_ROOT: &str = "/new-root";
    mount_spec(&Mount::of_disk(disk, NEW_ROOT, "ext4", "noatime"))?;
    unmount_early()?;
    free_initramfs()?;
    chdir(NEW_ROOT).context("enter the new root")?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .context("move the new root over /")?;
    chroot(".").context("change root")?;
    chdir("/").context("enter /")?;
    // Mount propagation into containers needs a shared root. Later mounts inherit the propagation.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SHARED, None::<&str>)
        .context("make / a shared mount")?;
    mount_system()
}

/// Deletes the files of the initramfs, which occupy memory and are not read again.
fn free_initramfs() -> Result<()> {
    for entry in fs::read_dir("/").context("read the initramfs")?.flatten() {
        let path = entry.path();
        if path == Path::new("/new-root") {
            continue;
        }
        let removed =
            if entry.file_type()?.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("remove {} from the initramfs", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_selected_by_type() {
        let mountinfo = "\
21 1 253:0 / / rw,noatime shared:1 - ext4 /dev/vda rw
30 21 253:16 / /data rw,nodev shared:5 - xfs /dev/vdb rw,prjquota
31 21 0:20 / /run rw - tmpfs tmpfs rw
32 31 253:16 /volumes/a /pods/a rw - xfs /dev/vdb rw,prjquota
";
        assert_eq!(mount_points(mountinfo, "xfs"), ["/data", "/pods/a"]);
        assert!(mount_points(mountinfo, "x").is_empty());
    }
}
