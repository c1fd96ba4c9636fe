//! Creates disk images on the host, on sparse files, with the file systems' own programs.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::debian::as_root;
use crate::process::Program;

/// What `xfs_repair -n` prints about a log that is to be replayed.
const LOG_IGNORED: &str = "valuable metadata changes in a log";

/// Creates an empty XFS of this size. The image takes only the space that is written to it.
///
/// # Errors
/// The file cannot be created, or mkfs.xfs fails (it requires at least 300 MiB).
pub async fn xfs(path: &Path, size_mib: u64) -> Result<()> {
    sparse(path, size_mib)?;
    // Discarding would only punch holes into a file without data.
    Program::new("mkfs.xfs").args(["-q", "-f", "-K"]).arg(path).run().await?;
    Ok(())
}

/// Returns `true` if the image begins as an XFS does.
pub fn is_xfs(image: &Path) -> Result<bool> {
    let mut magic = [0; 4];
    let mut read = || match File::open(image)?.read_exact(&mut magic) {
        // It is shorter than the superblock.
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(()),
        result => result,
    };
    read().with_context(|| format!("read {}", image.display()))?;
    Ok(magic == *b"XFSB")
}

/// Checks an XFS that no machine uses, with `xfs_repair -n`. It changes nothing.
///
/// # Errors
/// The file system is corrupt, or was not unmounted. The message has the output of xfs_repair.
pub async fn check_xfs(image: &Path) -> Result<()> {
    let finished = Program::new("xfs_repair").args(["-n", "-f"]).arg(image).finish().await?;
    let output = format!("{}{}", finished.stdout, finished.stderr);
    // In this mode, xfs_repair ignores a log that is not empty, and may find that all is well without it.
    anyhow::ensure!(
        !output.contains(LOG_IGNORED),
        "its XFS was not unmounted, so its log is to be replayed; something had it in use when the machine ended"
    );
    anyhow::ensure!(finished.status.success(), "xfs_repair -n finds its XFS corrupt:\n{}", output.trim());
    Ok(())
}

/// Destroys the index of the free space of the second allocation group of an XFS, for tests of those who have to notice it. A
/// kernel notices it when it allocates blocks there.
pub fn damage_xfs(image: &Path) -> Result<()> {
    damage(image).with_context(|| format!("damage {}", image.display()))
}

fn damage(image: &Path) -> Result<()> {
    let file = File::options().read(true).write(true).open(image)?;
    let number = |offset| {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, offset).map(|()| u64::from(u32::from_be_bytes(bytes)))
    };
    // The superblock (xfs_format.h) has the size of a block and the number of blocks in a group. The second block of a group
    // is the root of the index.
    let (block_size, group_blocks) = (number(4)?, number(84)?);
    file.write_all_at(&[0xff; 512], block_size * (group_blocks + 1))?;
    Ok(())
}

/// Creates a read-only disk that brings files of the host into a guest. `files` has pairs of the path in the
/// guest, without a leading slash, and the file of the host. All are executable and owned by root.
pub async fn payload(path: &Path, files: &[(String, PathBuf)]) -> Result<()> {
    let staging = tempfile::tempdir_in(path.parent().context("an image has a parent directory")?)?;
    let mut bytes = 0;
    for (name, host) in files {
        let target = staging.path().join(name);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        }
        bytes += fs::copy(host, &target).with_context(|| format!("copy {}", host.display()))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&target, mode)
            .with_context(|| format!("set the mode of {}", target.display()))?;
    }
    // Additional space for the metadata of a few files. The image is sparse, so unused space costs nothing.
    ext4(path, bytes / (1 << 20) + bytes / (20 << 20) + 16, staging.path(), &["^has_journal"]).await
}

/// Creates an empty ext4 file system of this size.
pub async fn empty_ext4(path: &Path, size_mib: u64) -> Result<()> {
    let empty = tempfile::tempdir().context("create a directory")?;
    ext4(path, size_mib, empty.path(), &[]).await
}

/// Creates an ext4 file system with the content of a directory.
pub(super) async fn ext4(path: &Path, size_mib: u64, content: &Path, features: &[&str]) -> Result<()> {
    sparse(path, size_mib)?;
    let mut program = as_root("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-m", "0"])
        // mke2fs initialises all tables here. Otherwise a kernel thread would do it in the emulated guest.
        .args(["-E", "lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0"]);
    for feature in features {
        program = program.arg("-O").arg(*feature);
    }
    program.arg("-d").arg(content).arg(path).run().await?;
    Ok(())
}

/// Changes an ext4 image that is not mounted, with commands of debugfs(8), such as `rm FILE` or `symlink FILE TARGET`.
///
/// # Errors
/// A command fails, as for a missing file or a path with a space, or the image cannot be written.
pub async fn edit_ext4(image: &Path, commands: &[String]) -> Result<()> {
    if commands.is_empty() {
        return Ok(());
    }
    let commands = commands.join("\n");
    let finished =
        Program::new("debugfs").args(["-w", "-f", "/dev/stdin"]).arg(image).input(commands).run().await?;
    // debugfs exits with 0 after a command that failed. It writes its version and each error to standard error.
    let errors: Vec<&str> = finished.stderr.lines().filter(|line| !line.starts_with("debugfs ")).collect();
    anyhow::ensure!(errors.is_empty(), "change {}: {}", image.display(), errors.join("; "));
    Ok(())
}

fn sparse(path: &Path, size_mib: u64) -> Result<()> {
    File::create(path)
        .and_then(|file| file.set_len(size_mib << 20))
        .with_context(|| format!("make the {size_mib} MiB file {}", path.display()))
}

/// Copies a disk image without filling its holes.
pub async fn copy(image: &Path, target: &Path) -> Result<()> {
    Program::new("cp").arg("--").arg(image).arg(target).run().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A failed edit is an error.
    #[tokio::test]
    async fn ext4_image_is_edited() {
        let dir = tempfile::tempdir().unwrap();
        let content = dir.path().join("content");
        fs::create_dir_all(content.join("bin")).unwrap();
        fs::write(content.join("bin/mount"), "program").unwrap();
        let image = dir.path().join("image");
        ext4(&image, 8, &content, &[]).await.unwrap();

        let (remove, link) = ("rm /bin/mount".to_owned(), "symlink /bin/losetup /opt/loopfs".to_owned());
        edit_ext4(&image, &[remove.clone(), link.clone()]).await.unwrap();
        let listing =
            Program::new("debugfs").args(["-R", "ls -p /bin"]).arg(&image).run().await.unwrap().stdout;
        assert!(!listing.contains("/mount/") && listing.contains("/losetup/"), "{listing}");
        Program::new("e2fsck").args(["-f", "-n"]).arg(&image).run().await.unwrap();

        for failing in [remove, link, "rm /bin/a b".to_owned(), "symlink /bin/a /b c".to_owned()] {
            let name = failing.split(' ').next().unwrap();
            let error = edit_ext4(&image, std::slice::from_ref(&failing)).await.unwrap_err().to_string();
            assert!(error.contains(&format!("{name}: ")), "{error}");
        }
    }

    /// A sound file system passes.
    #[tokio::test]
    async fn corrupt_xfs_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        xfs(&image, 300).await.unwrap();
        assert!(is_xfs(&image).unwrap());
        check_xfs(&image).await.unwrap();
        damage_xfs(&image).unwrap();
        let error = format!("{:#}", check_xfs(&image).await.unwrap_err());
        assert!(error.contains("corrupt") && error.contains("block 1/1"), "{error}");
        sparse(&image, 1).unwrap();
        assert!(!is_xfs(&image).unwrap());
    }
}
