//! Unix sockets to which only those can connect whom the mode permits, and which are removed on shutdown.

use std::fs::{self, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use tokio::net::UnixListener;

/// Only the user of the process can connect, who is root.
pub const OF_ROOT: u32 = 0o600;
/// The group of the socket can connect too: the group of a directory with the set-group-ID bit.
pub const OF_GROUP: u32 = 0o660;

/// The path at which a process listens, and the file that its socket has there.
#[derive(Clone, Debug)]
pub struct SocketPath {
    pub(crate) path: PathBuf,
    identity: (u64, u64),
}

/// A socket's name in the file system. Dropping it removes the name, if the name still refers to this socket.
#[derive(Debug)]
pub struct SocketFile(SocketPath);

/// Listens at `path`, with this mode. Atomically replaces a socket that an earlier process left: the name is never absent, and never
/// has a mode that permits others to connect.
///
/// The kubelet ignores hidden names, so it does not see the socket before it is ready.
///
/// # Errors
/// Another kind of file exists there, or the directory does not exist or cannot be written.
pub fn listen(path: &Path, mode: u32) -> anyhow::Result<(UnixListener, SocketFile)> {
    let context = || format!("listen on {}", path.display());
    if let Some(file) = metadata(path).with_context(context)? {
        ensure!(
            file.file_type().is_socket(),
            "{}: a file exists there that is not a socket; remove it",
            context()
        );
    }
    // Another process may be doing the same. Processes in other containers can have the same id, so the name is random. A process that is
    // killed before the rename leaves a socket that nothing uses.
    let hidden = path.with_file_name(format!(".{:08x}", RandomState::new().hash_one(path) >> 32));
    let listener = UnixListener::bind(&hidden).with_context(context)?;
    let file = fs::symlink_metadata(&hidden).with_context(context)?;
    let mut file = SocketFile(SocketPath { path: hidden, identity: (file.dev(), file.ino()) });
    fs::set_permissions(&file.0.path, Permissions::from_mode(mode)).with_context(context)?;
    fs::rename(&file.0.path, path).with_context(context)?;
    file.0.path = path.to_owned();
    Ok((listener, file))
}

/// Removes a socket that an earlier process left, so that no client waits for a response from it.
///
/// # Errors
/// The socket cannot be removed.
pub fn remove_stale(path: &Path) -> anyhow::Result<()> {
    match metadata(path).with_context(|| format!("stat {}", path.display()))? {
        Some(file) if file.file_type().is_socket() => {
            fs::remove_file(path).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn metadata(path: &Path) -> io::Result<Option<fs::Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl SocketFile {
    /// Returns the path of the socket.
    #[must_use]
    pub fn path(&self) -> &SocketPath {
        &self.0
    }
}

impl SocketPath {
    /// Returns `true` if the path still refers to this socket. The kernel does not use its inode number again while the process listens.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        metadata(&self.path).ok().flatten().is_some_and(|file| (file.dev(), file.ino()) == self.identity)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let Self(socket) = self;
        // Another process may have replaced the socket.
        if socket.is_in_place()
            && let Err(error) = fs::remove_file(&socket.path)
        {
            tracing::warn!(socket = %socket.path.display(), %error, "could not remove the socket; remove it");
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn dropped_stale_socket_keeps_its_replacement() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        let (listener, stale) = listen(&path, OF_ROOT).unwrap();
        drop(listener);
        let (_listener, file) = listen(&path, OF_ROOT).unwrap();
        assert!(!stale.path().is_in_place());
        drop(stale);
        assert!(file.path().is_in_place());
        UnixStream::connect(&path).await.unwrap();
    }

    #[tokio::test]
    async fn processes_that_replace_one_socket_do_not_fail() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        let replace = |path: PathBuf| move || (0..200).for_each(|_| drop(listen(&path, OF_ROOT).unwrap()));
        let processes = [(); 4].map(|()| tokio::task::spawn_blocking(replace(path.clone())));
        for process in processes {
            process.await.unwrap();
        }
        fs::remove_file(&path).ok();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "a hidden name was not removed");
    }

    #[tokio::test]
    async fn file_instead_of_socket_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        fs::write(&path, "precious").unwrap();
        assert!(listen(&path, OF_ROOT).unwrap_err().to_string().contains("not a socket"));
        remove_stale(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
