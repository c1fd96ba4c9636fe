//! The server. Anybody in the cluster may ask, so little is given to each.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::{encoding::text, registry::Registry};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// More wait until one of these has its answer.
const MOST_CONNECTIONS: usize = 16;
/// A connection has one request, and this long for it.
const CONNECTION_TIME: Duration = Duration::from_secs(30);
/// Who asks more often than this is told the same metrics again.
const FRESH: Duration = Duration::from_secs(1);

/// The text format's name (OpenMetrics 1.0).
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT_TYPE: &str = "text/plain; charset=utf-8";

/// What the pages say.
pub trait Pages: Send + Sync + 'static {
    /// `/metrics`: all that is known now. What cannot be found out is left out, rather than told as 0 or as it was. Asked
    /// by one scrape at a time, once a second at most.
    fn metrics(&self) -> impl Future<Output = Result<Registry, String>> + Send;
    /// `/healthz`: whether the process does its work, be what it needs usable or not.
    fn alive(&self) -> impl Future<Output = Result<(), String>> + Send;
    /// `/readyz`: whether it can serve now, or why not.
    fn ready(&self) -> impl Future<Output = Result<(), String>> + Send;
}

/// Serves until `stop`.
///
/// # Errors
/// None that is known: what fails about a connection ends that connection.
pub async fn serve<P: Pages>(listener: TcpListener, pages: P, stop: CancellationToken) -> anyhow::Result<()> {
    let site = Arc::new(Site { pages, told: Mutex::new(None) });
    let free = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut connections = JoinSet::new();
    let accept = async {
        loop {
            let place = Arc::clone(&free).acquire_owned().await.context("the semaphore is never closed")?;
            match listener.accept().await {
                Ok((stream, _peer)) => {
                    let site = Arc::clone(&site);
                    connections.spawn(async move {
                        let _place = place;
                        answer(stream, site).await;
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

async fn answer<P: Pages>(stream: TcpStream, site: Arc<Site<P>>) {
    let respond = service_fn(move |request: Request<Incoming>| {
        let site = Arc::clone(&site);
        async move { Ok::<_, Infallible>(site.respond(request.method(), request.uri().path()).await) }
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

struct Site<P> {
    pages: P,
    /// The metrics that were told last, and when. One scrape at a time.
    told: Mutex<Option<(Instant, Bytes)>>,
}

impl<P: Pages> Site<P> {
    async fn respond(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        let (status, content_type, body) = match (method, path) {
            (&Method::GET | &Method::HEAD, "/metrics") => match self.metrics().await {
                Ok(text) => (StatusCode::OK, METRICS_TYPE, text),
                Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT_TYPE, why.into()),
            },
            (&Method::GET | &Method::HEAD, "/healthz" | "/readyz") => {
                let verdict =
                    if path == "/healthz" { self.pages.alive().await } else { self.pages.ready().await };
                match verdict {
                    Ok(()) => (StatusCode::OK, TEXT_TYPE, Bytes::from_static(b"ok\n")),
                    Err(why) => (StatusCode::SERVICE_UNAVAILABLE, TEXT_TYPE, format!("{why}\n").into()),
                }
            }
            (&Method::GET | &Method::HEAD, _) => (
                StatusCode::NOT_FOUND,
                TEXT_TYPE,
                Bytes::from_static(b"there are /metrics, /healthz and /readyz\n"),
            ),
            _ => (StatusCode::METHOD_NOT_ALLOWED, TEXT_TYPE, Bytes::from_static(b"only GET and HEAD\n")),
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }

    async fn metrics(&self) -> Result<Bytes, String> {
        let mut told = self.told.lock().await;
        if let Some((when, text)) = told.as_ref()
            && when.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let registry = self.pages.metrics().await?;
        let mut text = String::new();
        text::encode(&mut text, &registry).map_err(|error: fmt::Error| error.to_string())?;
        let text = Bytes::from(text);
        *told = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rstest::rstest;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::{Gauges, HttpAddress};

    #[derive(Default)]
    struct Story {
        scrapes: AtomicU64,
    }

    impl Pages for Story {
        async fn metrics(&self) -> Result<Registry, String> {
            let mut registry = Registry::default();
            registry.count("scrapes", "Scrapes", self.scrapes.fetch_add(1, Ordering::Relaxed) + 1);
            registry.counts("kinds", "By kind", "kind", [("a", 2), ("b", u64::MAX)]);
            registry.bytes("size", "Size", 4096);
            registry.seconds("age", "Age", Duration::from_millis(1500));
            Ok(registry)
        }

        async fn alive(&self) -> Result<(), String> {
            Ok(())
        }

        async fn ready(&self) -> Result<(), String> {
            Err("mount it".to_owned())
        }
    }

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn served<T>(asking: impl AsyncFnOnce(SocketAddr) -> T) -> T {
        let listener = HttpAddress::At(([127, 0, 0, 1], 0).into()).listen().await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let serving = tokio::spawn(serve(listener, Story::default(), stop.clone()));
        let answer = asking(address).await;
        stop.cancel();
        serving.await.unwrap().unwrap();
        answer
    }

    #[rstest]
    #[case::alive("GET /healthz", "200 OK", "ok\n")]
    #[case::not_ready("GET /readyz", "503 Service Unavailable", "mount it\n")]
    #[case::head("HEAD /readyz", "503 Service Unavailable", "\r\n")]
    #[case::elsewhere("GET /etc/passwd", "404 Not Found", "there are /metrics, /healthz and /readyz\n")]
    #[case::post("POST /metrics", "405 Method Not Allowed", "only GET and HEAD\n")]
    #[tokio::test]
    async fn pages(#[case] request: &str, #[case] status: &str, #[case] body: &str) {
        let answer = served(async |address| ask(address, request).await).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        assert!(answer.ends_with(body), "{answer}");
    }

    #[tokio::test]
    async fn metrics_are_told_in_the_text_format() {
        let answer = served(async |address| ask(address, "GET /metrics").await).await;
        assert!(answer.contains(METRICS_TYPE), "{answer}");
        let lines = [
            "scrapes 1",
            r#"kinds{kind="a"} 2"#,
            r#"kinds{kind="b"} 9223372036854775807"#,
            "size_bytes 4096",
            "age_seconds 1.5",
        ];
        for line in lines {
            assert!(answer.contains(&format!("\n{line}\n")), "{line} is not in {answer}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn metrics_are_found_out_once_a_second() {
        let site = Site { pages: Story::default(), told: Mutex::new(None) };
        let first = site.metrics().await.unwrap();
        assert_eq!(site.metrics().await.unwrap(), first);
        tokio::time::advance(FRESH).await;
        assert_ne!(site.metrics().await.unwrap(), first);
    }
}
