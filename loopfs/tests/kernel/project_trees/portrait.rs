//! The observable metadata and content of the inodes of a tree, for comparing two trees.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use loopfs::test_support;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use rustix::buffer::spare_capacity;
use rustix::fs::{lgetxattr, llistxattr};

/// The metadata and content of an inode under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EntryMetadata {
    mode: u32,
    owner: (u32, u32),
    device: u64,
    /// The size. It is `None` for directories, whose size the file system chooses.
    size: Option<u64>,
    /// The link count. For directories it is the number of subdirectories.
    links: u64,
    /// The first name of the same inode in the tree.
    first_name: PathBuf,
    accessed: (i64, i64),
    modified: (i64, i64),
    attributes: BTreeMap<OsString, Vec<u8>>,
    /// The flags and extent size hints of regular files and directories.
    flags: Option<(u32, u32, u32)>,
    content: Content,
}

#[derive(Clone, PartialEq, Eq)]
enum Content {
    None,
    Link(PathBuf),
    File(Vec<u8>),
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("-"),
            Self::Link(destination) => write!(f, "-> {}", destination.display()),
            Self::File(bytes) => {
                let sum =
                    bytes.iter().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
                write!(f, "{} bytes, {sum:x}", bytes.len())
            }
        }
    }
}

/// The metadata of every name in a directory tree. The directory itself is `.`.
pub(super) type TreeMetadata = BTreeMap<PathBuf, EntryMetadata>;

pub(super) fn read_tree_metadata(tree: &Path) -> TreeMetadata {
    let mut first_names = BTreeMap::new();
    let mut tree_metadata = TreeMetadata::new();
    let mut pending = vec![PathBuf::from(".")];
    while let Some(name) = pending.pop() {
        let path = tree.join(&name);
        // The status is read before anything else, because reading a symbolic link changes its access time.
        let status = fs::symlink_metadata(&path).unwrap();
        let first_name = first_names.entry(status.ino()).or_insert_with(|| name.clone()).clone();
        tree_metadata.insert(name.clone(), EntryMetadata::of(&path, &status, first_name));
        if status.is_dir() {
            let mut names = list(&path).into_iter().map(|entry| name.join(entry)).collect::<Vec<_>>();
            // Sorted, so that both trees are walked in the same order.
            names.sort();
            pending.extend(names);
        }
    }
    tree_metadata
}

/// Lists a directory without changing its access time, unlike [`fs::read_dir`].
fn list(directory: &Path) -> Vec<OsString> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOATIME | OFlag::O_CLOEXEC;
    let mut opened = nix::dir::Dir::open(directory, flags, Mode::empty()).unwrap();
    let names = opened.iter().map(|entry| entry.unwrap().file_name().to_bytes().to_vec());
    names.filter(|name| !matches!(name.as_slice(), b"." | b"..")).map(OsString::from_vec).collect()
}

/// Restores the access time, because the trees are compared again later.
fn restore_access_time(path: &Path, status: &fs::Metadata) {
    let time = |status: &fs::Metadata| (status.atime(), status.atime_nsec());
    if time(&fs::symlink_metadata(path).unwrap()) == time(status) {
        return;
    }
    let (seconds, nanoseconds) = time(status);
    let time = TimeSpec::new(seconds, nanoseconds);
    let unchanged = TimeSpec::UTIME_OMIT;
    utimensat(nix::fcntl::AT_FDCWD, path, &time, &unchanged, UtimensatFlags::NoFollowSymlink).unwrap();
}

impl EntryMetadata {
    pub(super) fn flags(&self) -> Option<(u32, u32, u32)> {
        self.flags
    }

    fn of(path: &Path, status: &fs::Metadata, first_name: PathBuf) -> Self {
        let kind = status.file_type();
        let open = || File::options().read(true).custom_flags(libc::O_NOATIME | libc::O_NOFOLLOW).open(path);
        let (mut content, mut flags) = (Content::None, None);
        if kind.is_symlink() {
            content = Content::Link(fs::read_link(path).unwrap());
            restore_access_time(path, status);
        } else if kind.is_file() {
            let mut file = open().unwrap();
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            content = Content::File(bytes);
            flags = Some(test_support::flags(&file).unwrap());
        } else if kind.is_dir() {
            flags = Some(test_support::flags(open().unwrap()).unwrap());
        }
        let node = kind.is_block_device() || kind.is_char_device();
        Self {
            mode: status.mode(),
            owner: (status.uid(), status.gid()),
            device: if node { status.rdev() } else { 0 },
            size: (!kind.is_dir()).then(|| status.size()),
            links: status.nlink(),
            first_name,
            accessed: (status.atime(), status.atime_nsec()),
            modified: (status.mtime(), status.mtime_nsec()),
            attributes: attributes(path),
            flags,
            content,
        }
    }
}

fn attributes(path: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let mut list = Vec::with_capacity(64 << 10);
    llistxattr(path, spare_capacity(&mut list)).unwrap();
    list.split(|byte| *byte == 0)
        .filter(|name| !name.is_empty() && !name.starts_with(b"trusted.loopfs."))
        .map(|name| {
            let mut value = Vec::with_capacity(64 << 10);
            lgetxattr(path, CString::new(name).unwrap(), spare_capacity(&mut value)).unwrap();
            (OsString::from_vec(name.to_vec()), value)
        })
        .collect()
}

/// Removes the access times of symbolic links. Reading a link changes its access time, and no kernel
/// interface can set it.
pub(super) fn without_access_times_of_links(mut tree_metadata: TreeMetadata) -> TreeMetadata {
    for entry in tree_metadata.values_mut().filter(|entry| matches!(entry.content, Content::Link(_))) {
        entry.accessed = (0, 0);
    }
    tree_metadata
}

/// Panics with the first difference, because a dump of two whole trees would hide it.
#[track_caller]
pub(super) fn assert_equal_trees(found: &TreeMetadata, expected: &TreeMetadata) {
    let names = |tree_metadata: &TreeMetadata| tree_metadata.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    for (name, entry) in expected {
        assert_eq!(&found[name], entry, "{:?}", name.as_os_str().as_bytes().escape_ascii().to_string());
    }
}
