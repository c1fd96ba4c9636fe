//! A limit on the open connections of a gRPC server. If there are too many, the server closes one.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
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
/// that has the most. Connections whose TLS handshake has not succeeded are closed before all others. Clients without a certificate can
/// therefore close only connections of each other, however many of them there are.
pub fn limited<I, C: PartialEq + Debug>(
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
    /// Whether the TLS handshake has succeeded, while the connection exists.
    is_admitted: Weak<AtomicBool>,
}

impl<C> OpenConnection<C> {
    fn is_admitted(&self) -> bool {
        self.is_admitted.upgrade().is_some_and(|is_admitted| is_admitted.load(Ordering::Relaxed))
    }
}

impl<C: PartialEq + Debug> OpenConnections<C> {
    fn admit<I>(&mut self, client: C, stream: I) -> Limited<I> {
        self.0.retain(|connection| connection.is_admitted.strong_count() > 0);
        if self.0.len() >= MAX_CONNECTIONS
            && let Some(position) = self.position_to_close()
        {
            let OpenConnection { client, close, .. } = self.0.remove(position);
            // A client can cause any number of these lines.
            tracing::debug!(?client, "closing a connection for a new one: {MAX_CONNECTIONS} are open");
            close.cancel();
        }
        let close = CancellationToken::new();
        let is_admitted = Arc::new(AtomicBool::new(false));
        self.0.push(OpenConnection {
            client,
            close: close.clone(),
            is_admitted: Arc::downgrade(&is_admitted),
        });
        Limited { stream, closed: Box::pin(close.cancelled_owned()), is_admitted }
    }

    fn position_to_close(&self) -> Option<usize> {
        let mut positions: Vec<usize> =
            (0..self.0.len()).filter(|position| !self.0[*position].is_admitted()).collect();
        if positions.is_empty() {
            positions = (0..self.0.len()).collect();
        }
        let clients: Vec<_> = positions.iter().map(|position| &self.0[*position].client).collect();
        connection_to_close(&clients).map(|chosen| positions[chosen])
    }
}

/// A connection that counts as open until it is dropped.
#[derive(Debug)]
pub struct Limited<I> {
    stream: I,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    is_admitted: Arc<AtomicBool>,
}

impl<I: Connected> Connected for Limited<I> {
    type ConnectInfo = I::ConnectInfo;

    /// tonic calls this when it begins to serve the connection: over TLS, when the client has proven that it has a certificate.
    fn connect_info(&self) -> Self::ConnectInfo {
        self.is_admitted.store(true, Ordering::Relaxed);
        self.stream.connect_info()
    }
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
    async fn unauthenticated_clients_cannot_close_admitted_connections() {
        let mut open = OpenConnections(Vec::new());
        let mut admitted = open.admit(1, duplex(64).0);
        admitted.connect_info();
        // Each is of another client.
        let others: Vec<_> = (2..=40).map(|last| open.admit(last, duplex(64).0)).collect();
        assert_eq!(open.0.len(), MAX_CONNECTIONS);
        // The other end of each stream was dropped, so only a closed connection fails.
        let mut byte = [0];
        assert_eq!(admitted.read(&mut byte).await.unwrap(), 0);
        drop(others);
    }

    #[tokio::test]
    async fn admitted_connections_close_each_other() {
        let mut open = OpenConnections(Vec::new());
        let mut streams = Vec::new();
        for last in 1..=40 {
            let stream = open.admit(last, duplex(64).0);
            stream.connect_info();
            streams.push(stream);
        }
        let mut byte = [0];
        assert!(streams[0].read(&mut byte).await.is_err());
        assert_eq!(streams[39].read(&mut byte).await.unwrap(), 0);
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
