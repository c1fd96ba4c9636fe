//! Connections of clients that take the path of a socket for the name of a server.
//!
//! grpc-go sends the address it dialled as `:authority`, percent-encoded. The kubelet dials a registration socket by its
//! bare path, so it sends `%2Fvar%2Flib%2Fkubelet%2F…`, which is no authority; the HTTP library here resets the stream.
//! On a unix socket the authority says nothing, so it is replaced on the way in.
//!
//! Of the header compression (RFC 7541) only the structure has to be understood. The new value is one byte long, thus
//! never longer than the one it replaces; so the table of the receiver, in which an entry may be kept, never drops an
//! entry that the sender's table still has, and later references mean the same.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

mod frames;
mod header_block;

use frames::Frames;

/// Accepts connections for a gRPC server.
pub(crate) fn incoming(listener: UnixListener) -> impl Stream<Item = io::Result<Connection>> {
    UnixListenerStream::new(listener).map(|stream| stream.map(Connection::new))
}

/// A client's connection, with an authority that can be read.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    frames: Frames,
    /// Ready to be read, from `taken` on.
    decoded: Vec<u8>,
    taken: usize,
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        Self { stream, frames: Frames::new(), decoded: Vec::new(), taken: 0 }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let mut chunk = [0; 8192];
        while this.taken == this.decoded.len() {
            let mut received = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut received))?;
            this.decoded.clear();
            this.taken = 0;
            if received.filled().is_empty() {
                // A frame that was cut off is passed on as it came, once; then the end is the end.
                this.frames.finish(&mut this.decoded);
                break;
            }
            this.frames.feed(received.filled(), &mut this.decoded);
        }
        let ready = &this.decoded[this.taken..];
        let part = &ready[..ready.len().min(out.remaining())];
        out.put_slice(part);
        this.taken += part.len();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
