//! Streams: a named pipe that a component writes to, and a unix socket that it connects to.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use csi::socket::{self, SocketFile};
use jiff::Timestamp;
use nix::errno::Errno;
use nix::sys::stat::Mode;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

use super::line::LineSplitter;
use super::ring::Ring;
use crate::protected;

/// Connections to the socket of one component. Further ones wait.
const MAX_CONNECTIONS: usize = 16;

const CHUNK_BYTES: usize = 16 << 10;

/// The mode of a directory that is created: components of other users can reach the socket or the pipe if an administrator changes its mode.
const DIRECTORY_MODE: u32 = 0o755;

/// The wait after a connection could not be accepted.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Reads the named pipe, and creates it if it does not exist.
pub(super) async fn follow_fifo(path: &Path, ring: &Ring) -> anyhow::Result<()> {
    let path = &protected::path(path, DIRECTORY_MODE)?;
    match nix::unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno).with_context(|| format!("create the named pipe {}", path.display())),
    }
    // Open for writing as well: the pipe then has no end when the last writer closes it.
    let pipe = pipe::OpenOptions::new()
        .read_write(true)
        .open_receiver(path)
        .with_context(|| format!("open {}, which must be a named pipe", path.display()))?;
    read(pipe, ring).await.with_context(|| format!("read {}", path.display()))
}

/// Listens on a socket in a [protected] directory, unless another process or another component does. It would lose its clients without
/// notice.
pub(crate) async fn listen(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    match UnixStream::connect(path).await {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
        // Its queue is full, it is a socket of another type, or this user may not connect.
        Ok(_) | Err(_) => {
            bail!("another process listens on {}; stop it, or choose another path", path.display())
        }
    }
    socket::listen(path, socket::OF_ROOT)
}

/// Listens on the socket. Only root and the user of this process can connect, unless an administrator changes its mode.
pub(super) async fn follow_socket(path: &Path, ring: Arc<Ring>) -> anyhow::Result<()> {
    let path = &protected::path(path, DIRECTORY_MODE)?;
    let (listener, _removed_on_drop) = listen(path).await?;
    let mut connections = JoinSet::new();
    loop {
        if connections.len() >= MAX_CONNECTIONS {
            connections.join_next().await;
        }
        tokio::select! {
            accepted = listener.accept() => {
                let stream = match accepted {
                    Ok((stream, _)) => stream,
                    // No descriptor is free. The connected components continue to write.
                    Err(error) => {
                        tracing::warn!(%error, socket = %path.display(), "could not accept a connection; retrying");
                        tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                        continue;
                    }
                };
                let ring = Arc::clone(&ring);
                connections.spawn(async move {
                    // A component that crashes may reset its connection. It connects again when it starts.
                    read(stream, &ring).await.ok();
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn read(mut stream: impl AsyncRead + Unpin, ring: &Ring) -> io::Result<()> {
    let mut lines = LineSplitter::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let length = stream.read(&mut chunk).await?;
        let now = Timestamp::now();
        lines.feed(&chunk[..length], |line| ring.push(line, now));
        if length == 0 {
            lines.finish().into_iter().for_each(|line| ring.push(line, now));
            return Ok(());
        }
    }
}
