//! Files of a hostile tenant, for the programs that walk its volume: the kubelet, and the driver that deletes it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::mkfifo;

use crate::volume::{Checked, named};

/// The number of sockets, of FIFOs and of deleted files that are open.
const COUNT: usize = 16;
/// The number of names of one file.
const LINKS: usize = 200;
/// The size of the file that the tenant charges to another volume.
const CHARGED: usize = 1 << 20;
/// The directories of the deep tree. Their path is five times as long as the kernel accepts in a system call.
const DEPTH: usize = 100;
const LONG_NAME: usize = 200;
/// The longest name that a file system accepts.
const LONGEST_NAME: usize = 255;

/// What exists as long as the tenant runs: deleted files that are open, and listening sockets.
pub(crate) struct Open {
    _files: Vec<File>,
    _sockets: Vec<UnixListener>,
}

/// Fills `directory` with hostile files, and `deep` with a deep tree. `outside` is a directory of the node, to which symbolic
/// links point.
pub(crate) fn plant(directory: &Path, deep: &Path, outside: &Path) -> Checked<Open> {
    let part = |name: &str| -> Checked<PathBuf> {
        let path = directory.join(name);
        fs::create_dir(&path).map_err(|e| named(&format!("create {}", path.display()), e))?;
        Ok(path)
    };
    plant_links(&part("links")?, outside).map_err(|e| named("plant symbolic links", e))?;
    fs::write(part("charged")?.join("file"), vec![0xA5; CHARGED]).map_err(|e| named("write a file", e))?;
    plant_names(&part("names")?).map_err(|e| named("plant names", e))?;
    plant_hard_links(&part("hard-links")?).map_err(|e| named("plant hard links", e))?;
    let sockets = plant_special(&part("special")?).map_err(|e| named("plant special files", e))?;
    let files = open_deleted(directory).map_err(|e| named("open deleted files", e))?;
    // The kubelet opens directories in `directory` for the group of a pod.
    plant_closed(&deep.join("closed")).map_err(|e| named("plant directories without permissions", e))?;
    plant_deep(deep).map_err(|e| named("plant a deep tree", e))?;
    Ok(Open { _files: files, _sockets: sockets })
}

/// Creates links out of the volume, and one that stays in it.
fn plant_links(directory: &Path, outside: &Path) -> std::io::Result<()> {
    let node_file = Path::new("/etc/kubernetes/kubelet.key");
    let up = PathBuf::from("../".repeat(40));
    for (name, target) in [
        ("inside", Path::new("../names")),
        ("directory", outside),
        ("file", node_file),
        ("root", Path::new("/")),
        ("up", &up),
        ("chain", Path::new("directory")),
        ("loop", Path::new("loop")),
        ("dangling", Path::new("/none")),
    ] {
        symlink(target, directory.join(name))?;
    }
    Ok(())
}

fn plant_names(directory: &Path) -> std::io::Result<()> {
    for name in names() {
        fs::write(directory.join(&name), "file")?;
        let mut in_directory = OsString::from("d");
        in_directory.push(&name);
        let in_directory = directory
            .join(OsStr::from_bytes(&in_directory.as_bytes()[..in_directory.len().min(LONGEST_NAME)]));
        fs::create_dir(&in_directory)?;
        fs::write(in_directory.join(&name), "file in a directory")?;
    }
    Ok(())
}

/// Returns names that programs can mistake for an option, a pattern, several lines or text.
fn names() -> Vec<OsString> {
    let mut names: Vec<OsString> =
        ["-rf", "...", " ", "*", "a\nb", "\n", "'\"$(id)", "\u{1b}[2J", "\t", "\u{202e}txt"]
            .map(OsString::from)
            .into();
    names.push(OsStr::from_bytes(b"\xff\xfe").to_owned());
    names.push(OsStr::from_bytes(b"cut \xe2\x82").to_owned());
    names.push("n".repeat(LONGEST_NAME).into());
    names
}

fn plant_hard_links(directory: &Path) -> std::io::Result<()> {
    let first = directory.join("0");
    fs::write(&first, "many names")?;
    (1..LINKS).try_for_each(|number| fs::hard_link(&first, directory.join(number.to_string())))
}

fn plant_special(directory: &Path) -> std::io::Result<Vec<UnixListener>> {
    for number in 0..COUNT {
        mkfifo(&directory.join(format!("fifo-{number}")), Mode::S_IRUSR | Mode::S_IWUSR)?;
    }
    (0..COUNT).map(|number| UnixListener::bind(directory.join(format!("socket-{number}")))).collect()
}

/// Creates files, opens and deletes them. Their blocks are freed when they are closed.
fn open_deleted(directory: &Path) -> std::io::Result<Vec<File>> {
    let open = |number: usize| {
        let path = directory.join(format!("deleted-{number}"));
        let mut file = File::create(&path)?;
        fs::remove_file(&path)?;
        file.write_all(&[0xA5; 4096])?;
        file.sync_all()?;
        Ok(file)
    };
    (0..COUNT).map(open).collect()
}

/// Creates directories that their owner may neither list nor enter nor change.
fn plant_closed(directory: &Path) -> std::io::Result<()> {
    let inner = directory.join("outer").join("inner");
    fs::create_dir_all(&inner)?;
    fs::write(inner.join("file"), "closed")?;
    for path in [inner.join("file"), inner.clone(), directory.join("outer"), directory.to_owned()] {
        fs::set_permissions(path, Permissions::from_mode(0o0))?;
    }
    Ok(())
}

fn plant_deep(directory: &Path) -> std::io::Result<()> {
    let name = "d".repeat(LONG_NAME);
    let mut parent = File::open(directory)?;
    for _ in 0..DEPTH {
        mkdirat(&parent, name.as_str(), Mode::S_IRWXU)?;
        parent = open_directory(&parent, &name)?;
    }
    Ok(())
}

fn open_directory(parent: &File, name: &str) -> std::io::Result<File> {
    use nix::fcntl::{OFlag, openat};
    Ok(openat(parent, name, OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};

    use super::*;

    #[test]
    fn all_hostile_files_are_planted() {
        let dir = tempfile::tempdir().unwrap();
        let [volume, deep] = ["volume", "deep"].map(|name| dir.path().join(name));
        fs::create_dir(&volume).unwrap();
        fs::create_dir(&deep).unwrap();
        let open = plant(&volume, &deep, Path::new("/outside")).unwrap();

        assert_eq!(fs::read_link(volume.join("links/directory")).unwrap(), Path::new("/outside"));
        assert!(volume.join("links/inside").join("*").is_file());
        assert_eq!(fs::read_dir(volume.join("names")).unwrap().count(), 2 * names().len());
        assert_eq!(fs::metadata(volume.join("hard-links/0")).unwrap().nlink(), LINKS as u64);
        let special =
            fs::read_dir(volume.join("special")).unwrap().map(|entry| entry.unwrap().file_type().unwrap());
        let (fifos, sockets): (Vec<_>, Vec<_>) = special.partition(FileTypeExt::is_fifo);
        assert_eq!((fifos.len(), sockets.len()), (COUNT, COUNT));
        assert!(open._files.iter().all(|file| file.metadata().unwrap().nlink() == 0));
        assert_eq!(fs::metadata(deep.join("closed")).unwrap().mode() & 0o777, 0);

        let mut parent = File::open(&deep).unwrap();
        for _ in 0..DEPTH {
            parent = open_directory(&parent, &"d".repeat(LONG_NAME)).unwrap();
        }
        // The directories without permissions could not be removed.
        for path in ["closed", "closed/outer", "closed/outer/inner"] {
            fs::set_permissions(deep.join(path), Permissions::from_mode(0o700)).unwrap();
        }
    }
}
