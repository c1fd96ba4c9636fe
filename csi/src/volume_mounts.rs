//! Where a volume is mounted, and whether its data directory enforces quotas, by what the kernel reports. No driver has to
//! run.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use loopfs::loop_device::{BackingFile, unmanaged};
use loopfs::mount::table::{self, Mount};
use loopfs::project_quota::ProjectQuota;
use loopfs::volume_store::VolumeId;
use nix::fcntl::OFlag;

/// Checks that `data_dir` is a mount point whose file system enforces project quotas.
///
/// # Errors
/// The message says what is mounted there instead, if anything. EIO: the disk failed.
pub fn require_project_quotas(data_dir: &Path) -> anyhow::Result<()> {
    // Otherwise the quotas of the file system below it would be checked.
    let mounted = table::at(&table::read()?, data_dir).is_some();
    ensure!(mounted, "nothing is mounted at {}", data_dir.display());
    let directory = File::open(data_dir).with_context(|| format!("open {}", data_dir.display()))?;
    let enforcing = ProjectQuota::of(directory.as_fd()).require_enforcing();
    enforcing.with_context(|| data_dir.display().to_string())
}

/// Returns the mount points outside of `data_dir` of a volume: of its directory, or of the node of a loop device that is
/// bound to its image. Returns `None` if there is no such volume.
///
/// # Errors
/// `/proc` or the data directory cannot be read.
pub fn mount_points(data_dir: &Path, volume: &VolumeId) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let entry = data_dir.join("volumes").join(volume.as_str());
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits()).open(&entry) {
        Ok(file) => BackingFile::of(file)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("open {}", entry.display())),
    };
    let mounts = table::read()?;
    let mounts = mounts_of(&mounts, volume, file, |index| unmanaged::attributes(index).backing);
    Ok(Some(mounts.map(|mount| mount.mount_point.clone()).collect()))
}

fn mounts_of<'a>(
    mounts: &'a [Mount],
    volume: &VolumeId,
    file: BackingFile,
    backing_of: impl Fn(u32) -> Option<BackingFile>,
) -> impl Iterator<Item = &'a Mount> {
    let directory = Path::new("/volumes").join(volume.as_str());
    mounts.iter().filter(move |mount| {
        let is_directory = mount.device == file.device && mount.root == directory;
        is_directory || loop_index(mount).and_then(&backing_of) == Some(file)
    })
}

/// Returns the index of the loop device whose node is mounted.
fn loop_index(mount: &Mount) -> Option<u32> {
    let is_devices = matches!(mount.fs_type.as_str(), "devtmpfs" | "tmpfs");
    is_devices.then(|| mount.root.file_name()?.to_str()?.strip_prefix("loop")?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
40 26 254:16 / /data rw - xfs /dev/vdb rw,prjquota\n\
41 40 254:16 /volumes/a /pods/1 rw - xfs /dev/vdb rw,prjquota\n\
42 40 254:16 /volumes/ab /pods/2 rw - xfs /dev/vdb rw,prjquota\n\
43 40 254:32 /volumes/a /pods/3 rw - xfs /dev/vdc rw\n\
44 26 0:6 /loop7 /pods/4 rw - devtmpfs udev rw\n\
45 26 0:6 /loop8 /pods/5 rw - devtmpfs udev rw\n";

    fn file(inode: u64) -> BackingFile {
        BackingFile { device: "254:16".parse().unwrap(), inode }
    }

    fn points(volume: &str, file: BackingFile) -> Vec<String> {
        let mounts = table::parse(TABLE).unwrap();
        let backing = |index| (index == 8).then_some(self::file(88));
        let volume = volume.parse().unwrap();
        let mounts = mounts_of(&mounts, &volume, file, backing);
        mounts.map(|mount| mount.mount_point.display().to_string()).collect()
    }

    #[test]
    fn a_directory_is_published_where_it_is_mounted_from_this_file_system() {
        assert_eq!(points("a", file(1)), ["/pods/1"]);
    }

    #[test]
    fn an_image_is_published_where_its_device_is_mounted() {
        assert_eq!(points("image", file(88)), ["/pods/5"]);
        assert_eq!(points("image", file(89)), [""; 0]);
    }

    #[test]
    fn a_plain_directory_has_no_quotas() {
        let directory = tempfile::tempdir().unwrap();
        let error = require_project_quotas(directory.path()).unwrap_err().to_string();
        assert!(error.starts_with("nothing is mounted at"), "{error}");
    }
}
