//! Connections of clients that send the path of the socket as the authority.
//!
//! grpc-go sends the dialled address as `:authority`, percent-encoded. The kubelet dials a registration socket by its
//! bare path, so it sends `%2Fvar%2Flib%2Fkubelet%2F…`. This is not a valid authority, and the HTTP/2 library resets
//! the stream. The authority has no meaning on a unix socket, so it is replaced in the received data.
//!
//! Only the registration socket needs this. Clients of the CSI socket send `localhost`.
//!
//! Only the structure of the header compression (RFC 7541) has to be parsed. The replacement is one byte long and
//! therefore never longer than the original. An entry that the receiver adds to its dynamic table is thus never larger
//! than the sender's entry. The receiver's table never drops an entry that the sender's table still has, and later
//! references keep their meaning.
//!
//! `docs/decisions/0032-kubelet-authority.md` gives the reasons.

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

/// A client's connection, with valid authorities.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    frames: Frames,
    /// Data to be read, from `taken` on.
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
                // An incomplete frame is passed on unchanged, once. The next read then reports the end.
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
