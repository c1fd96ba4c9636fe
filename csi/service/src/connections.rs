//! The connections of one listener. If there are too many, the listener closes one.

use std::net::IpAddr;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// Connections that one listener keeps open.
const MAX_CONNECTIONS: usize = 64;
/// The headers of a request fit into this many bytes.
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;
/// The time that a listener gives a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerDeadlines {
    /// The time to send the headers of its request.
    pub(crate) headers: Duration,
    /// The total time. A connection serves one request.
    pub(crate) connection: Duration,
}

/// The pause after a failure to accept a connection.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Serves HTTP/1 until `stop`.
///
/// The listener always accepts a new connection. If there are too many, it closes the oldest connection of the client
/// that has the most. A client can therefore use up only its own share. A probe sends its request immediately and
/// receives a response even while idle connections fill the listener.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    deadlines: ServerDeadlines,
    stop: CancellationToken,
) {
    let mut open = HttpConnections::default();
    let accept = async {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    open.admit(peer.ip().to_canonical(), serve_connection(stream, router.clone(), deadlines))
                }
                // No descriptor is free, or the client closed the connection before it was accepted.
                Err(error) => {
                    tracing::warn!(%error, "could not accept an HTTP connection; retrying in {RETRY_INTERVAL:?}");
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
        }
    };
    stop.run_until_cancelled(accept).await;
}

async fn serve_connection(stream: TcpStream, router: Router, deadlines: ServerDeadlines) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(deadlines.headers)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(deadlines.connection, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "an HTTP request failed"),
        Err(_elapsed) => tracing::debug!("an HTTP request took longer than {:?}", deadlines.connection),
    }
}

/// The open connections. Dropping it closes them.
#[derive(Default)]
struct HttpConnections {
    tasks: JoinSet<()>,
    /// The oldest first.
    clients: Vec<(IpAddr, AbortHandle)>,
}

impl HttpConnections {
    fn admit(&mut self, client: IpAddr, connection: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.clients.retain(|(_, task)| !task.is_finished());
        if self.clients.len() >= MAX_CONNECTIONS {
            let clients: Vec<IpAddr> = self.clients.iter().map(|(client, _)| *client).collect();
            if let Some(position) = connection_to_close(&clients) {
                let (client, task) = self.clients.remove(position);
                tracing::debug!(%client, "closing an HTTP connection for a new one: {MAX_CONNECTIONS} are open");
                task.abort();
            }
        }
        self.clients.push((client, self.tasks.spawn(connection)));
    }
}

/// Returns the position of the connection to close, given the clients of all connections, the oldest first: the oldest
/// connection of the client that has the most. Returns `None` if there are no connections.
pub fn connection_to_close<C: PartialEq>(clients: &[C]) -> Option<usize> {
    let count = |of: &C| clients.iter().filter(|client| *client == of).count();
    let most = clients.iter().map(count).max()?;
    clients.iter().position(|client| count(client) == most)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use rstest::rstest;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpSocket;

    use super::*;

    /// Longer than any test runs.
    const HOUR: Duration = Duration::from_secs(3600);
    const NO_DEADLINES: ServerDeadlines = ServerDeadlines { headers: HOUR, connection: HOUR };

    async fn served<T>(deadlines: ServerDeadlines, client: impl AsyncFnOnce(SocketAddr) -> T) -> T {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/healthz", get(async || "ok\n"));
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, router, deadlines, stop.clone()));
        let result = client(address).await;
        stop.cancel();
        serving.await.unwrap();
        result
    }

    /// Connects from an address that only this client has: every address of 127.0.0.0/8 is this machine's.
    async fn connect(client: u8, server: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, client], 0).into()).unwrap();
        socket.connect(server).await.unwrap()
    }

    async fn assert_response(server: SocketAddr) {
        let mut stream = connect(1, server).await;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    }

    /// Waits until the server has closed the connection; returns what it sent before.
    async fn read_until_closed(stream: &mut TcpStream) -> String {
        let mut response = Vec::new();
        if let Err(error) = stream.read_to_end(&mut response).await {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        }
        String::from_utf8(response).unwrap()
    }

    fn is_open(stream: &TcpStream) -> bool {
        let read = stream.try_read(&mut [0; 1]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    #[rstest]
    #[case::of_one_client(false)]
    #[case::of_as_many_clients(true)]
    #[tokio::test]
    async fn idle_connections_do_not_block_responses(#[case] of_many_clients: bool) {
        const EXCESS: usize = 3;
        served(NO_DEADLINES, async |server| {
            let mut idle = Vec::new();
            for client in (2..).take(MAX_CONNECTIONS + EXCESS - 1) {
                idle.push(connect(if of_many_clients { client } else { 2 }, server).await);
            }
            assert_response(server).await;
            let (closed, open) = idle.split_at_mut(EXCESS);
            for stream in closed {
                assert_eq!(read_until_closed(stream).await, "");
            }
            assert!(open.iter().all(is_open));
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn incomplete_request_is_closed_at_deadline() {
        let deadlines = ServerDeadlines { headers: Duration::from_secs(5), ..NO_DEADLINES };
        let begun = tokio::time::Instant::now();
        served(deadlines, async |server| {
            let mut stream = connect(1, server).await;
            stream.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
            read_until_closed(&mut stream).await;
        })
        .await;
        assert!(begun.elapsed() < NO_DEADLINES.connection, "another deadline closed it");
    }

    #[tokio::test]
    async fn too_large_headers_are_refused() {
        let response = served(NO_DEADLINES, async |server| {
            let mut stream = connect(1, server).await;
            let headers = format!("GET /healthz HTTP/1.1\r\nx: {}", "x".repeat(16 * MAX_HEADER_BYTES));
            // The server closes the connection before it has read all of them.
            stream.write_all(headers.as_bytes()).await.ok();
            read_until_closed(&mut stream).await
        });
        let response = response.await;
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 431 "), "{response}");
    }

    #[rstest]
    #[case::the_oldest_of_one_client(&[1, 1, 1], Some(0))]
    #[case::the_oldest_where_all_have_one(&[1, 2, 3], Some(0))]
    #[case::the_oldest_of_the_client_with_most(&[1, 2, 3, 2], Some(1))]
    #[case::never_one_of_a_client_with_fewer(&[1, 2, 2, 2, 1], Some(1))]
    #[case::none_without_connections(&[], None)]
    fn busiest_client_loses_oldest_connection(#[case] clients: &[u8], #[case] position: Option<usize>) {
        let clients: Vec<IpAddr> = clients.iter().map(|last| [127, 0, 0, *last].into()).collect();
        assert_eq!(connection_to_close(&clients), position);
    }
}
