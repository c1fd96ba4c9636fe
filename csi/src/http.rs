//! What is served over HTTP: `/metrics`, `/healthz` and `/readyz`. Anybody in the cluster may ask, so little is given to each.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use crate::audit::Audit;
use crate::metrics::{self, Calls, Snapshot};
use crate::probe::Probe;
use crate::proto::csi::GetPluginInfoRequest;
use crate::proto::csi::identity_client::IdentityClient;
use crate::rpc;
use crate::storage::{Health, StorageGate};

/// More wait until one of these has its answer.
const MOST_CONNECTIONS: usize = 16;
/// A connection has one request, and this long for it.
const CONNECTION_TIME: Duration = Duration::from_secs(30);
/// How long the gRPC server may take to say its name.
const SELF_CALL_TIME: Duration = Duration::from_secs(5);
/// Who asks more often than this is told the same again.
const FRESH: Duration = Duration::from_secs(1);

/// Where to serve HTTP: `ADDRESS:PORT`, or `:PORT` for all addresses of the pod or node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpAddress {
    /// One address.
    At(SocketAddr),
    /// IPv6 and IPv4 where there are both.
    All(u16),
}

impl FromStr for HttpAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = text.strip_prefix(':').map(str::parse);
        match (all, text.parse()) {
            (Some(Ok(port)), _) => Ok(Self::All(port)),
            (_, Ok(address)) => Ok(Self::At(address)),
            _ => Err("must be ADDRESS:PORT or :PORT, such as 127.0.0.1:9809, [::1]:9809 or :9809".to_owned()),
        }
    }
}

impl HttpAddress {
    /// Starts to listen.
    pub(crate) async fn listen(self) -> anyhow::Result<TcpListener> {
        let (first, second) = match self {
            Self::At(address) => (address, None),
            Self::All(port) => {
                let at = |ip: IpAddr| SocketAddr::new(ip, port);
                (at(Ipv6Addr::UNSPECIFIED.into()), Some(at(Ipv4Addr::UNSPECIFIED.into())))
            }
        };
        let listener = match (TcpListener::bind(first).await, second) {
            (Ok(listener), _) => Ok(listener),
            // A node without IPv6.
            (Err(_), Some(second)) => TcpListener::bind(second).await,
            (Err(error), None) => Err(error),
        };
        listener.with_context(|| format!("listen on port {} (--metrics-address)", first.port()))
    }
}

/// What the pages say.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) gate: Arc<StorageGate>,
    pub(crate) probe: Arc<Probe>,
    pub(crate) audit: Arc<Audit>,
    pub(crate) calls: Calls,
    /// The driver's own socket.
    pub(crate) endpoint: PathBuf,
    /// What was told last, and when. One scrape at a time.
    pub(crate) told: Mutex<Option<(Instant, Bytes)>>,
}

/// Serves until `stop`.
pub(crate) async fn serve(
    listener: TcpListener,
    pages: Arc<Pages>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let free = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut connections = JoinSet::new();
    let accept = async {
        loop {
            let place = Arc::clone(&free).acquire_owned().await.context("the semaphore is never closed")?;
            match listener.accept().await {
                Ok((stream, _peer)) => {
                    let pages = Arc::clone(&pages);
                    connections.spawn(async move {
                        let _place = place;
                        answer(stream, pages).await;
                    });
                }
                // Out of descriptors, or a peer that has gone.
                Err(error) => {
                    tracing::warn!(%error, "a connection to the metrics address was not accepted");
                    tokio::time::sleep(FRESH).await;
                }
            }
            while connections.try_join_next().is_some() {}
        }
    };
    match stop.run_until_cancelled(accept).await {
        None => Ok(()),
        Some(ended) => ended,
    }
}

async fn answer(stream: TcpStream, pages: Arc<Pages>) {
    let respond = service_fn(move |request: Request<Incoming>| {
        let pages = Arc::clone(&pages);
        async move { Ok::<_, Infallible>(pages.respond(request.method(), request.uri().path()).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CONNECTION_TIME)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), respond);
    match tokio::time::timeout(CONNECTION_TIME, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a request to the metrics address failed"),
        Err(_elapsed) => tracing::debug!("a request to the metrics address took too long"),
    }
}

impl Pages {
    async fn respond(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        const TEXT: &str = "text/plain; charset=utf-8";
        let (status, content_type, body) = match (method, path) {
            (&Method::GET | &Method::HEAD, "/metrics") => match self.metrics().await {
                Ok(text) => (StatusCode::OK, metrics::CONTENT_TYPE, text),
                Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, why.into()),
            },
            (&Method::GET | &Method::HEAD, "/healthz" | "/readyz") => {
                let verdict = if path == "/healthz" { self.is_alive().await } else { self.is_ready().await };
                match verdict {
                    Ok(()) => (StatusCode::OK, TEXT, Bytes::from_static(b"ok\n")),
                    Err(why) => (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n").into()),
                }
            }
            (&Method::GET | &Method::HEAD, _) => (
                StatusCode::NOT_FOUND,
                TEXT,
                Bytes::from_static(b"there are /metrics, /healthz and /readyz\n"),
            ),
            _ => (StatusCode::METHOD_NOT_ALLOWED, TEXT, Bytes::from_static(b"only GET and HEAD\n")),
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }

    /// Whether the process does its work, be its storage usable or not: asked on its own socket, so that one that was
    /// removed or taken by another is noticed too.
    async fn is_alive(&self) -> Result<(), String> {
        let name = async {
            let socket = Endpoint::try_from(format!("unix://{}", self.endpoint.display()))?;
            let mut identity = IdentityClient::new(socket.connect().await?);
            identity.get_plugin_info(GetPluginInfoRequest {}).await?;
            anyhow::Ok(())
        };
        let socket = self.endpoint.display();
        match tokio::time::timeout(SELF_CALL_TIME, name).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("the driver does not answer on {socket}: {error:#}")),
            Err(_elapsed) => Err(format!("the driver has not answered on {socket} for {SELF_CALL_TIME:?}")),
        }
    }

    /// As Identity.Probe.
    async fn is_ready(&self) -> Result<(), String> {
        match self.probe.health().await {
            Ok(Health::Ready) => Ok(()),
            Ok(Health::Starting) => Err("the storage is being opened".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn metrics(&self) -> Result<Bytes, String> {
        let mut told = self.told.lock().await;
        if let Some((when, text)) = told.as_ref()
            && when.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let (gate, findings) = (Arc::clone(&self.gate), self.audit.findings());
        let snapshot = rpc::blocking(move || Ok(Snapshot::take(&gate, findings))).await;
        let snapshot = snapshot.map_err(|error| error.to_string())?;
        let text = metrics::encode(&self.calls, &snapshot).map_err(|error| error.to_string())?;
        let text = Bytes::from(text);
        *told = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::all(":9809", Some(HttpAddress::All(9809)))]
    #[case::one("127.0.0.1:9809", Some(HttpAddress::At(([127, 0, 0, 1], 9809).into())))]
    #[case::one_of_ipv6("[::1]:9809", Some(HttpAddress::At((Ipv6Addr::LOCALHOST, 9809).into())))]
    #[case::no_port("127.0.0.1", None)]
    #[case::no_address("9809", None)]
    #[case::a_name("localhost:9809", None)]
    #[case::not_a_port(":98090", None)]
    fn addresses(#[case] text: &str, #[case] address: Option<HttpAddress>) {
        assert_eq!(text.parse().ok(), address);
    }

    #[tokio::test]
    async fn all_addresses_are_listened_on() {
        let listener = HttpAddress::All(0).listen().await.unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    }
}
