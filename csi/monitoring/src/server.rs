//! The pages of a program, and the two listeners that serve them.
//!
//! Any client that reaches the pod's address can send requests, so a client's requests cost little: checks are shared
//! ([`Latest`]) and connections are limited ([`connections`]). Probes have a listener of their own, so that scrapes and
//! probes do not compete, and so that a network policy can admit a Prometheus server to the metrics alone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Bytes;
use prometheus_client::{encoding::text, registry::Registry};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::address::HttpAddress;
use crate::connections::{self, Deadlines};
use crate::latest::{Latest, NoResult};

/// Scrapes within this time get the same metrics.
const METRICS_AGE: Duration = Duration::from_secs(1);
/// Probes within this time get the same verdict. Less than the interval at which the kubelet probes, so that each of its
/// probes gets a verdict of its own.
const VERDICT_AGE: Duration = Duration::from_secs(2);
/// A probe waits this long for a running check. Less than the `timeoutSeconds` of the manifests, so that the kubelet
/// receives the report that the check hangs.
const VERDICT_TIME: Duration = Duration::from_secs(8);
/// A scrape waits this long. Counting very many volumes takes its time.
const METRICS_TIME: Duration = Duration::from_secs(25);

/// A client that is slower than this is no Prometheus server and no kubelet.
const DEADLINES: Deadlines =
    Deadlines { headers: Duration::from_secs(5), connection: Duration::from_secs(30) };

/// The text format's name (OpenMetrics 1.0).
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the pages report.
pub trait Pages: Send + Sync + 'static {
    /// `/metrics`: everything that is known now. A figure that cannot be determined is left out, rather than reported as 0
    /// or with its last value. Called at most once a second, and never twice at the same time.
    fn metrics(&self) -> impl Future<Output = Result<Registry, String>> + Send;
    /// `/healthz`: whether the process works, even if what it depends on does not. Called at most every two seconds, and
    /// never twice at the same time.
    fn alive(&self) -> impl Future<Output = Result<(), String>> + Send;
    /// `/readyz`: whether it can serve now, or why not. Called as often as [`alive`](Self::alive).
    fn ready(&self) -> impl Future<Output = Result<(), String>> + Send;
}

/// The sockets on which a program serves its pages.
#[derive(Debug)]
pub struct Listeners {
    /// Serves all pages.
    pub metrics: Option<TcpListener>,
    /// Serves `/healthz` and `/readyz`.
    pub probes: Option<TcpListener>,
}

impl Listeners {
    /// Listens on the addresses of `--metrics-address` and `--probe-address`. Returns `None` if neither is given.
    ///
    /// # Errors
    /// As [`HttpAddress::listen`].
    pub async fn bind(
        metrics_address: Option<HttpAddress>,
        probe_address: Option<HttpAddress>,
    ) -> anyhow::Result<Option<Self>> {
        if metrics_address.is_none() && probe_address.is_none() {
            return Ok(None);
        }
        let listen = async |address: Option<HttpAddress>, flag| match address {
            Some(address) => address.listen(flag).await.map(Some),
            None => Ok(None),
        };
        Ok(Some(Self {
            metrics: listen(metrics_address, "--metrics-address").await?,
            probes: listen(probe_address, "--probe-address").await?,
        }))
    }
}

/// Serves the pages until `stop`.
pub async fn serve<P: Pages>(listeners: Listeners, pages: P, stop: CancellationToken) {
    let site = Arc::new(Site::new(pages));
    let serve = async |listener, router| match listener {
        Some(listener) => connections::serve(listener, router, DEADLINES, stop.clone()).await,
        None => stop.cancelled().await,
    };
    tokio::join!(serve(listeners.metrics, site.all_pages()), serve(listeners.probes, site.probe_pages()));
}

struct Site<P> {
    pages: Arc<P>,
    metrics: Latest<Result<Bytes, String>>,
    alive: Latest<Result<(), String>>,
    ready: Latest<Result<(), String>>,
}

impl<P: Pages> Site<P> {
    fn new(pages: P) -> Self {
        Self {
            pages: Arc::new(pages),
            metrics: Latest::new(METRICS_AGE, METRICS_TIME),
            alive: Latest::new(VERDICT_AGE, VERDICT_TIME),
            ready: Latest::new(VERDICT_AGE, VERDICT_TIME),
        }
    }

    /// Probes are also answered where metrics are served, for the manifests of earlier releases.
    fn all_pages(self: &Arc<Self>) -> Router {
        let site = Arc::clone(self);
        let metrics = Router::new().route("/metrics", get(async move || site.metrics().await));
        with_fallbacks(metrics.merge(self.verdicts()), "there are /metrics, /healthz and /readyz\n")
    }

    fn probe_pages(self: &Arc<Self>) -> Router {
        with_fallbacks(self.verdicts(), "there are /healthz and /readyz\n")
    }

    fn verdicts(self: &Arc<Self>) -> Router {
        let (alive, ready) = (Arc::clone(self), Arc::clone(self));
        Router::new()
            .route("/healthz", get(async move || alive.alive().await))
            .route("/readyz", get(async move || ready.ready().await))
    }

    async fn metrics(&self) -> Response {
        let pages = Arc::clone(&self.pages);
        let scrape = async move {
            let registry = pages.metrics().await?;
            let mut text = String::new();
            text::encode(&mut text, &registry).map_err(|error: fmt::Error| error.to_string())?;
            Ok(Bytes::from(text))
        };
        match self.metrics.get(|| scrape).await {
            Ok(Ok(text)) => ([(CONTENT_TYPE, METRICS_TYPE)], text).into_response(),
            Ok(Err(why)) => (StatusCode::INTERNAL_SERVER_ERROR, why).into_response(),
            Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, why.to_string()).into_response(),
        }
    }

    async fn alive(&self) -> Response {
        let pages = Arc::clone(&self.pages);
        verdict(self.alive.get(|| async move { pages.alive().await }).await)
    }

    async fn ready(&self) -> Response {
        let pages = Arc::clone(&self.pages);
        verdict(self.ready.get(|| async move { pages.ready().await }).await)
    }
}

fn verdict(result: Result<Result<(), String>, NoResult>) -> Response {
    let why = match result {
        Ok(Ok(())) => return "ok\n".into_response(),
        Ok(Err(why)) => why,
        Err(why) => why.to_string(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
}

fn with_fallbacks(routes: Router, pages: &'static str) -> Router {
    routes
        .fallback(async move || (StatusCode::NOT_FOUND, pages))
        .method_not_allowed_fallback(async || (StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicU64, Ordering};

    use axum::body::to_bytes;
    use rstest::rstest;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::Gauges;

    #[derive(Default)]
    struct Story {
        scrapes: AtomicU64,
        readiness_checks: AtomicU64,
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
            self.readiness_checks.fetch_add(1, Ordering::Relaxed);
            Err("mount it".to_owned())
        }
    }

    async fn ask(server: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(server).await.unwrap();
        stream.write_all(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Calls `asking` with the addresses of the metrics and the probes.
    async fn served<T>(asking: impl AsyncFnOnce(SocketAddr, SocketAddr) -> T) -> T {
        let address = Some(HttpAddress::At(([127, 0, 0, 1], 0).into()));
        let listeners = Listeners::bind(address, address).await.unwrap().unwrap();
        let at = |listener: &Option<TcpListener>| listener.as_ref().unwrap().local_addr().unwrap();
        let (metrics, probes) = (at(&listeners.metrics), at(&listeners.probes));
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listeners, Story::default(), stop.clone()));
        let answer = asking(metrics, probes).await;
        stop.cancel();
        serving.await.unwrap();
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
        let answer = served(async |metrics, _probes| ask(metrics, request).await).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        assert!(answer.ends_with(body), "{answer}");
    }

    #[rstest]
    #[case::alive("GET /healthz", "200 OK", "ok\n")]
    #[case::not_ready("GET /readyz", "503 Service Unavailable", "mount it\n")]
    #[case::no_metrics("GET /metrics", "404 Not Found", "there are /healthz and /readyz\n")]
    #[tokio::test]
    async fn the_probe_listener_serves_probes_and_nothing_else(
        #[case] request: &str,
        #[case] status: &str,
        #[case] body: &str,
    ) {
        let answer = served(async |_metrics, probes| ask(probes, request).await).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        assert!(answer.ends_with(body), "{answer}");
    }

    #[tokio::test]
    async fn metrics_are_told_in_the_text_format() {
        let answer = served(async |metrics, _probes| ask(metrics, "GET /metrics").await).await;
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
    async fn metrics_are_determined_once_a_second() {
        let site = Site::new(Story::default());
        let scrape = async || to_bytes(site.metrics().await.into_body(), usize::MAX).await.unwrap();
        let first = scrape().await;
        assert_eq!(scrape().await, first);
        tokio::time::advance(METRICS_AGE).await;
        assert_ne!(scrape().await, first);
    }

    #[tokio::test(start_paused = true)]
    async fn readiness_is_determined_once_every_two_seconds_however_many_ask() {
        let site = Site::new(Story::default());
        for checks in 1..=3 {
            for _ in 0..100 {
                assert_eq!(site.ready().await.status(), StatusCode::SERVICE_UNAVAILABLE);
            }
            assert_eq!(site.pages.readiness_checks.load(Ordering::Relaxed), checks);
            tokio::time::advance(VERDICT_AGE).await;
        }
    }
}
