//! A limit on the open connections of a gRPC server. If there are too many, the server closes one.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use service::connection_to_close;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// Connections that a listener keeps open.
const MAX_CONNECTIONS: usize = 32;

/// Keeps [`MAX_CONNECTIONS`] open.
///
/// The listener always accepts a new connection. If there are too many, it closes the oldest connection of the client
/// that has the most.
pub(crate) fn limited<I, C: PartialEq + Debug>(
    incoming: impl Stream<Item = io::Result<I>>,
    client_of: impl Fn(&I) -> C,
) -> impl Stream<Item = io::Result<Limited<I>>> {
    let mut open = OpenConnections(Vec::new());
    incoming.map(move |connection| {
        connection.map(|stream| {
            let client = client_of(&stream);
            open.admit(client, stream)
        })
    })
}

/// The open connections, the oldest first.
struct OpenConnections<C>(Vec<OpenConnection<C>>);

struct OpenConnection<C> {
    client: C,
    close: CancellationToken,
    /// The other end is dropped with the connection.
    exists: Weak<()>,
}

impl<C: PartialEq + Debug> OpenConnections<C> {
    fn admit<I>(&mut self, client: C, stream: I) -> Limited<I> {
        self.0.retain(|connection| connection.exists.strong_count() > 0);
        let clients: Vec<&C> = self.0.iter().map(|connection| &connection.client).collect();
        if clients.len() >= MAX_CONNECTIONS
            && let Some(position) = connection_to_close(&clients)
        {
            let OpenConnection { client, close, .. } = self.0.remove(position);
            // A client can cause any number of these lines.
            tracing::debug!(?client, "closing a connection for a new one: {MAX_CONNECTIONS} are open");
            close.cancel();
        }
        let close = CancellationToken::new();
        let exists = Arc::new(());
        self.0.push(OpenConnection { client, close: close.clone(), exists: Arc::downgrade(&exists) });
        Limited { stream, closed: Box::pin(close.cancelled_owned()), _exists: exists }
    }
}

/// A connection that counts as open until it is dropped.
#[derive(Debug)]
pub(crate) struct Limited<I> {
    stream: I,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    _exists: Arc<()>,
}

impl<I> Connected for Limited<I> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<I: AsyncRead + Unpin> AsyncRead for Limited<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, out)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Limited<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Otherwise a client that reads nothing would keep the connection open.
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, DuplexStream, duplex};
    use tokio::time::timeout;

    use super::*;

    /// A client that opens too many connections loses its own oldest ones.
    #[tokio::test]
    async fn client_closes_only_its_own_connections() {
        let mut ends = Vec::new();
        let streams = (0..=MAX_CONNECTIONS + 1).map(|_| {
            let (stream, end) = duplex(64);
            ends.push(end);
            Ok(stream)
        });
        // The first connection is of another client than all others.
        let streams: Vec<io::Result<DuplexStream>> = streams.collect();
        let is_first = std::cell::Cell::new(true);
        let client = |_: &DuplexStream| if is_first.replace(false) { 1 } else { 2 };
        let mut open: Vec<_> = limited(tokio_stream::iter(streams), client).collect().await;
        let mut is_closed = Vec::new();
        for connection in &mut open {
            let stream = connection.as_mut().unwrap();
            is_closed.push(matches!(timeout(Duration::ZERO, stream.read_u8()).await, Ok(Err(_))));
        }
        let closed: Vec<usize> = (0..is_closed.len()).filter(|at| is_closed[*at]).collect();
        assert_eq!(closed, [1, 2]);
    }

    #[tokio::test]
    async fn connections_that_ended_do_not_count() {
        let mut open = OpenConnections(Vec::new());
        for _ in 0..2 * MAX_CONNECTIONS {
            drop(open.admit(1, ()));
        }
        let kept = open.admit(1, ());
        assert_eq!(open.0.len(), 1);
        drop(kept);
    }
}
