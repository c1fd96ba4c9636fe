//! The endpoints of a program, and the two listeners that serve them.
//!
//! Any client that reaches the pod's address can send requests, so a client's requests cost little: checks are shared
//! ([`LatestResult`]) and connections are limited ([`connections`]). Probes have a listener of their own, so that scrapes
//! and probes do not compete, and so that a network policy can admit a Prometheus server to the metrics alone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Bytes;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::address::HttpAddress;
use crate::args::HealthArgs;
use crate::connections::{self, ServerDeadlines};
use crate::gauges::register_readiness;
use crate::latest::{LatestResult, NoResult};

/// Scrapes within this time return the same metrics.
const METRICS_MAX_AGE: Duration = Duration::from_secs(1);
/// Probes within this time return the same result. It is less than the interval at which the kubelet probes, so that
/// each of its probes returns a new result.
const CHECK_MAX_AGE: Duration = Duration::from_secs(2);
/// The maximum time that a probe waits for a running check. It is less than the `timeoutSeconds` of the manifests, so
/// that the kubelet receives the report that the check hangs.
const CHECK_TIMEOUT: Duration = Duration::from_secs(8);
/// The maximum time that a scrape waits for a running check. Counting very many volumes takes some time.
const METRICS_TIMEOUT: Duration = Duration::from_secs(25);

/// The deadlines of a connection. Prometheus servers and kubelets are faster.
const DEADLINES: ServerDeadlines =
    ServerDeadlines { headers: Duration::from_secs(5), connection: Duration::from_secs(30) };

/// The media type of the text format (OpenMetrics 1.0).
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The contents of the endpoints.
pub trait HealthEndpoints: Send + Sync + 'static {
    /// Returns the content of `/metrics`: all current values. A value that cannot be determined is omitted, rather than
    /// reported as 0 or with its last value. Called at most once a second, and never concurrently. The page also has the
    /// verdict of the latest check of readiness ([`register_readiness`]).
    fn metrics(&self) -> impl Future<Output = Result<Registry, String>> + Send;
    /// Returns the result of `/healthz`: `Ok` if the process works, even if its dependencies do not. Called at most
    /// every two seconds, and never concurrently.
    fn liveness(&self) -> impl Future<Output = Result<(), String>> + Send;
    /// Returns the result of `/readyz`: `Ok` if the process can serve now, else the reason. Called as often as
    /// [`liveness`](Self::liveness).
    fn readiness(&self) -> impl Future<Output = Result<(), String>> + Send;
    /// Returns a fault that does not keep the process from serving. The body of `/readyz` has it behind `ok`.
    fn notice(&self) -> Option<String> {
        None
    }
}

/// The sockets on which a program serves its endpoints.
#[derive(Debug)]
pub struct Listeners {
    /// Serves all endpoints.
    pub metrics: Option<TcpListener>,
    /// Serves `/healthz` and `/readyz`.
    pub probes: Option<TcpListener>,
}

impl Listeners {
    /// Listens on the addresses. Returns `None` if neither is given.
    ///
    /// # Errors
    /// As [`HttpAddress::listen`].
    pub async fn bind(addresses: HealthArgs) -> anyhow::Result<Option<Self>> {
        let HealthArgs { metrics_address, probe_address } = addresses;
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

/// Serves the endpoints until `stop`.
pub async fn serve_health<E: HealthEndpoints>(listeners: Listeners, endpoints: E, stop: CancellationToken) {
    let site = Arc::new(Site::new(endpoints));
    let serve = async |listener, router| match listener {
        Some(listener) => connections::serve(listener, router, DEADLINES, stop.clone()).await,
        None => stop.cancelled().await,
    };
    tokio::join!(serve(listeners.metrics, site.all_routes()), serve(listeners.probes, site.probe_routes()));
}

struct Site<E> {
    endpoints: Arc<E>,
    metrics: LatestResult<Result<Bytes, String>>,
    liveness: LatestResult<Result<(), String>>,
    readiness: LatestResult<Result<(), String>>,
    /// The verdict of the latest check of readiness, or `None` before the first.
    ready: watch::Sender<Option<bool>>,
}

impl<E: HealthEndpoints> Site<E> {
    fn new(endpoints: E) -> Self {
        Self {
            endpoints: Arc::new(endpoints),
            metrics: LatestResult::new(METRICS_MAX_AGE, METRICS_TIMEOUT),
            liveness: LatestResult::new(CHECK_MAX_AGE, CHECK_TIMEOUT),
            readiness: LatestResult::new(CHECK_MAX_AGE, CHECK_TIMEOUT),
            ready: watch::Sender::new(None),
        }
    }

    /// Returns the routes of the metrics listener. It also serves the probes, for services that have no other listener.
    fn all_routes(self: &Arc<Self>) -> Router {
        let site = Arc::clone(self);
        let metrics = Router::new().route("/metrics", get(async move || site.metrics().await));
        with_fallbacks(metrics.merge(self.check_routes()), "there are /metrics, /healthz and /readyz\n")
    }

    fn probe_routes(self: &Arc<Self>) -> Router {
        with_fallbacks(self.check_routes(), "there are /healthz and /readyz\n")
    }

    fn check_routes(self: &Arc<Self>) -> Router {
        let (liveness, readiness) = (Arc::clone(self), Arc::clone(self));
        Router::new()
            .route("/healthz", get(async move || liveness.liveness().await))
            .route("/readyz", get(async move || readiness.readiness().await))
    }

    async fn metrics(&self) -> Response {
        let endpoints = Arc::clone(&self.endpoints);
        let ready = *self.ready.borrow();
        let scrape = async move {
            let mut registry = endpoints.metrics().await?;
            if let Some(ready) = ready {
                register_readiness(&mut registry, ready);
            }
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

    async fn liveness(&self) -> Response {
        let endpoints = Arc::clone(&self.endpoints);
        check_response(self.liveness.get(|| async move { endpoints.liveness().await }).await)
    }

    async fn readiness(&self) -> Response {
        let endpoints = Arc::clone(&self.endpoints);
        let result = self.readiness.get(|| async move { endpoints.readiness().await }).await;
        // A check that hangs is a verdict, too: the kubelet receives it.
        self.ready.send_replace(Some(matches!(result, Ok(Ok(())))));
        match self.endpoints.notice() {
            Some(notice) if matches!(result, Ok(Ok(()))) => format!("ok\n{notice}\n").into_response(),
            _ => check_response(result),
        }
    }
}

fn check_response(result: Result<Result<(), String>, NoResult>) -> Response {
    let why = match result {
        Ok(Ok(())) => return "ok\n".into_response(),
        Ok(Err(why)) => why,
        Err(why) => why.to_string(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
}

fn with_fallbacks(routes: Router, not_found: &'static str) -> Router {
    routes
        .fallback(async move || (StatusCode::NOT_FOUND, not_found))
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
    struct FakeEndpoints {
        scrapes: AtomicU64,
        readiness_checks: AtomicU64,
        /// A fault in spite of which the process serves.
        notice: Option<String>,
    }

    impl HealthEndpoints for FakeEndpoints {
        async fn metrics(&self) -> Result<Registry, String> {
            let mut registry = Registry::default();
            registry.count("scrapes", "Scrapes", self.scrapes.fetch_add(1, Ordering::Relaxed) + 1);
            registry.counts("kinds", "By kind", "kind", [("a", 2), ("b", u64::MAX)]);
            registry.bytes("size", "Size", 4096);
            registry.seconds("age", "Age", Duration::from_millis(1500));
            Ok(registry)
        }

        async fn liveness(&self) -> Result<(), String> {
            Ok(())
        }

        async fn readiness(&self) -> Result<(), String> {
            self.readiness_checks.fetch_add(1, Ordering::Relaxed);
            self.notice.as_ref().map(|_| ()).ok_or_else(|| "mount it".to_owned())
        }

        fn notice(&self) -> Option<String> {
            self.notice.clone()
        }
    }

    #[tokio::test]
    async fn a_ready_process_reports_its_fault() {
        let notice = Some("apply the policies".to_owned());
        let response = Site::new(FakeEndpoints { notice, ..FakeEndpoints::default() }).readiness().await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(to_bytes(response.into_body(), usize::MAX).await.unwrap(), "ok\napply the policies\n");
    }

    async fn send(server: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(server).await.unwrap();
        stream.write_all(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    /// Calls `client` with the addresses of the metrics and the probes.
    async fn served<T>(client: impl AsyncFnOnce(SocketAddr, SocketAddr) -> T) -> T {
        let address = Some(HttpAddress::One(([127, 0, 0, 1], 0).into()));
        let addresses = HealthArgs { metrics_address: address, probe_address: address };
        let listeners = Listeners::bind(addresses).await.unwrap().unwrap();
        let at = |listener: &Option<TcpListener>| listener.as_ref().unwrap().local_addr().unwrap();
        let (metrics, probes) = (at(&listeners.metrics), at(&listeners.probes));
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve_health(listeners, FakeEndpoints::default(), stop.clone()));
        let response = client(metrics, probes).await;
        stop.cancel();
        serving.await.unwrap();
        response
    }

    #[rstest]
    #[case::alive(false, "GET /healthz", "200 OK", "ok\n")]
    #[case::not_ready(false, "GET /readyz", "503 Service Unavailable", "mount it\n")]
    #[case::head(false, "HEAD /readyz", "503 Service Unavailable", "\r\n")]
    #[case::elsewhere(
        false,
        "GET /etc/passwd",
        "404 Not Found",
        "there are /metrics, /healthz and /readyz\n"
    )]
    #[case::post(false, "POST /metrics", "405 Method Not Allowed", "only GET and HEAD\n")]
    #[case::probed_alive(true, "GET /healthz", "200 OK", "ok\n")]
    #[case::probed_not_ready(true, "GET /readyz", "503 Service Unavailable", "mount it\n")]
    #[case::no_metrics_for_probes(true, "GET /metrics", "404 Not Found", "there are /healthz and /readyz\n")]
    #[tokio::test]
    async fn each_listener_serves_its_endpoints(
        #[case] of_probes: bool,
        #[case] request: &str,
        #[case] status: &str,
        #[case] body: &str,
    ) {
        let client = async |metrics, probes| send(if of_probes { probes } else { metrics }, request).await;
        let response = served(client).await;
        assert!(response.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{response}");
        assert!(response.ends_with(body), "{response}");
    }

    #[tokio::test]
    async fn metrics_have_the_openmetrics_text_format() {
        let response = served(async |metrics, _probes| send(metrics, "GET /metrics").await).await;
        assert!(response.contains(METRICS_TYPE), "{response}");
        let lines = [
            "scrapes 1",
            r#"kinds{kind="a"} 2"#,
            r#"kinds{kind="b"} 9223372036854775807"#,
            "size_bytes 4096",
            "age_seconds 1.5",
        ];
        for line in lines {
            assert!(response.contains(&format!("\n{line}\n")), "{line} is not in {response}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn metrics_are_gathered_once_a_second() {
        let site = Site::new(FakeEndpoints::default());
        let scrape = async || to_bytes(site.metrics().await.into_body(), usize::MAX).await.unwrap();
        let first = scrape().await;
        assert_eq!(scrape().await, first);
        tokio::time::advance(METRICS_MAX_AGE).await;
        assert_ne!(scrape().await, first);
    }

    #[tokio::test(start_paused = true)]
    async fn metrics_report_latest_readiness_check() {
        let site = Site::new(FakeEndpoints::default());
        let scrape = async || {
            let page = to_bytes(site.metrics().await.into_body(), usize::MAX).await.unwrap();
            tokio::time::advance(METRICS_MAX_AGE).await;
            String::from_utf8(page.to_vec()).unwrap()
        };
        let page = scrape().await;
        assert!(!page.contains("\nready "), "{page}");
        assert_eq!(site.readiness().await.status(), StatusCode::SERVICE_UNAVAILABLE);
        let page = scrape().await;
        assert!(page.contains("\nready 0\n"), "{page}");
    }

    /// Any number of requests share one result for two seconds.
    #[tokio::test(start_paused = true)]
    async fn readiness_result_is_cached() {
        let site = Site::new(FakeEndpoints::default());
        for checks in 1..=3 {
            for _ in 0..100 {
                assert_eq!(site.readiness().await.status(), StatusCode::SERVICE_UNAVAILABLE);
            }
            assert_eq!(site.endpoints.readiness_checks.load(Ordering::Relaxed), checks);
            tokio::time::advance(CHECK_MAX_AGE).await;
        }
    }
}
