//! The connection to the API server and its deadlines.
//!
//! All requests and watches share one connection, because the API server speaks HTTP/2. Behind a proxy that speaks only HTTP/1.1,
//! each watch has a connection of its own.
//!
//! A machine that loses its power closes no connection, and neither does a load balancer that stops forwarding. Without
//! deadlines this process would wait for the rest of a response until it is restarted. So each request has a deadline for its whole
//! response. A watch cannot have one, because its response lasts for minutes. But the API server sends a bookmark about
//! once a minute even if nothing changes, so a watch that delivers nothing for several minutes is dead. Pings of HTTP/2 detect
//! an API server that stopped sooner, and the kernel's keepalive probes a dead machine.
//!
//! The timeouts of tower and tower-http end with the head of a response, or limit a pause in its body, and return an error. A whole response
//! with its body, and a watch that expires, need the functions of this module.
//!
//! The API server compresses long responses, which are mostly lists, to a fraction of their size.

use std::time::Duration;

use anyhow::Context as _;
use futures::stream;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as HttpBody, Bytes, Frame};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder, ConfigExt};
use kube::{Client, Config};
use serde_json::json;
use tokio::time::timeout;
use tower::retry::RetryLayer;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt};
use tower_http::decompression::DecompressionLayer;

use crate::api::pages::{Pages, whole};
use crate::api::request::{self, layer};
use crate::api::traffic::ApiTraffic;

/// The deadlines of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// The longest time from a request to the end of its response, including retries of 429 and 503. For a watch: to the start of
    /// the response.
    pub(crate) request: Duration,
    /// The longest time in which a watch delivers nothing. It is longer than the API server's interval between two
    /// bookmarks, so that only a dead watch reaches it.
    pub(crate) silence: Duration,
    /// The idle time after which HTTP/2 sends a ping, and the time within which the API server must answer it.
    pub(crate) ping: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        // The API server gives up a request after 60 s (--request-timeout), and sends a bookmark each 60 s.
        Timeouts {
            request: Duration::from_secs(60),
            silence: Duration::from_secs(150),
            ping: Duration::from_secs(15),
        }
    }
}

/// Timeout of the TCP and TLS handshakes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Idle time after which the kernel probes a connection.
const KEEPALIVE_TIME: Duration = Duration::from_secs(15);
/// Interval between two probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Number of probes without a response after which a connection fails.
const KEEPALIVE_RETRIES: u32 = 3;
/// A connection fails if its peer has not acknowledged data for this long.
const USER_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a client whose requests end in time; `traffic` counts them.
///
/// # Errors
/// When the configuration cannot be used: its certificates, its credentials, or a proxy, which is not supported.
pub(crate) fn client(config: Config, timeouts: Timeouts, traffic: &ApiTraffic) -> anyhow::Result<Client> {
    if let Some(proxy) = &config.proxy_url {
        return Err(kube::Error::ProxyProtocolUnsupported { proxy_url: Box::new(proxy.clone()) }.into());
    }
    let mut connector = TimeoutConnector::new(tls(&config)?);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_write_timeout(Some(timeouts.request));
    let connections = legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .http2_keep_alive_interval(timeouts.ping)
        .http2_keep_alive_timeout(timeouts.ping)
        .build::<_, Body>(connector);
    // The same layers as in `ClientBuilder::try_from`, which allows neither socket options nor HTTP/2.
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .layer(DecompressionLayer::new().gzip(!config.disable_compression))
        .layer(RetryLayer::new(RetryPolicy::server_retry()))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(connections);
    let builder = ClientBuilder::new(service, config.default_namespace);
    let (pages, traffic) = (Pages::default(), traffic.clone());
    Ok(builder
        .with_layer(&layer(move |service, request| pages.clone().send(service, request)))
        .with_layer(&layer(move |service, request| send_within(timeouts, service, request)))
        .with_layer(&layer(move |service, request| traffic.clone().observe(service, request)))
        .build())
}

fn tls(config: &Config) -> anyhow::Result<HttpsConnector<HttpConnector>> {
    let mut builder =
        HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = name.clone().try_into().with_context(|| format!("tls-server-name {name}"))?;
        builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    Ok(builder.enable_all_versions().wrap_connector(tcp()))
}

fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    // The TLS connector around it passes on URIs of the scheme https.
    tcp.enforce_http(false);
    tcp.set_keepalive(Some(KEEPALIVE_TIME));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    tcp.set_tcp_user_timeout(Some(USER_TIMEOUT));
    tcp
}

/// Sends a request, and gives it or each event of its watch this much time.
async fn send_within<S, B>(
    timeouts: Timeouts,
    service: S,
    request: Request<Body>,
) -> Result<Response<UnsyncBoxBody<Bytes, BoxError>>, BoxError>
where
    S: Service<Request<Body>, Response = Response<B>, Error: Into<BoxError>>,
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let Timeouts { request: deadline, silence, ping: _ } = timeouts;
    let is_watch = request::is_watch(request.uri());
    let complete = async move {
        let (head, body) = service.oneshot(request).await.map_err(Into::into)?.into_parts();
        let body = if is_watch {
            within_silence(body, silence).boxed_unsync()
        } else {
            // The caller reads the whole body anyway; here its time counts towards the deadline.
            whole(body.collect().await.map_err(Into::into)?.to_bytes())
        };
        Ok(Response::from_parts(head, body))
    };
    timeout(deadline, complete).await.unwrap_or_else(|_elapsed| {
        Err(format!("the API server has not responded within {deadline:?}").into())
    })
}

/// The state of the body of a watch.
enum WatchBody<B> {
    /// Nothing was delivered yet.
    Begun(B),
    Delivering(B),
    Ended,
}

/// Returns the body of a watch, which ends if it delivers nothing for this long.
///
/// If it was delivering before, the connection is probably dead, and the watch is resumed after the error. A watch that delivers not even
/// a bookmark from its start ends as expired instead, so that the objects are listed again. After a restoration of etcd from a backup,
/// the resource version from which a watch resumes may be in the future. The API server accepts such a watch and delivers nothing.
fn within_silence<B>(body: B, silence: Duration) -> impl HttpBody<Data = Bytes, Error = BoxError>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    StreamBody::new(stream::try_unfold(WatchBody::Begun(Box::pin(body)), move |state| async move {
        let (mut body, is_delivering) = match state {
            WatchBody::Begun(body) => (body, false),
            WatchBody::Delivering(body) => (body, true),
            WatchBody::Ended => return Ok(None),
        };
        match timeout(silence, body.frame()).await {
            Ok(None) => Ok(None),
            Ok(Some(frame)) => {
                Ok(Some((frame.map_err(Into::<BoxError>::into)?, WatchBody::Delivering(body))))
            }
            Err(_elapsed) if is_delivering => {
                Err(format!("the watch has delivered nothing for {silence:?}").into())
            }
            Err(_elapsed) => Ok(Some((Frame::data(expired(silence)), WatchBody::Ended))),
        }
    }))
}

/// Returns the event with which the API server ends a watch from a resource version that it does not have any more.
fn expired(silence: Duration) -> Bytes {
    let message = format!(
        "the watch has delivered nothing for {silence:?} since it began, not even a bookmark; the objects are listed again, because \
         the API server may have been restored from a backup"
    );
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": StatusCode::GONE.as_u16(),
        "reason": "Expired", "message": message,
    });
    format!("{}\n", json!({"type": "ERROR", "object": status})).into()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use futures::{StreamExt, TryStreamExt};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use kube::api::{WatchEvent, WatchParams};
    use rstest::rstest;
    use rustix::net::sockopt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tower::Layer;
    use tower_test::mock;

    use super::*;

    /// Timeout of the tests, longer than any request in them takes.
    const GUARD: Duration = Duration::from_secs(60);
    const NEVER: Duration = Duration::from_secs(3600);

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Returns a client of a server that responds with `text` to each request and then neither sends nor closes.
    async fn client_of_silent_server(text: impl Into<String>, timeouts: Timeouts) -> Client {
        let text = text.into();
        let (listener, address) = listener().await;
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _peer)) = listener.accept().await {
                let mut request = [0; 1024];
                assert!(stream.read(&mut request).await.unwrap() > 0);
                stream.write_all(text.as_bytes()).await.unwrap();
                open.push(stream);
            }
        });
        let config = Config::new(format!("http://{address}").parse().unwrap());
        super::client(config, timeouts, &ApiTraffic::default()).unwrap()
    }

    fn config_maps(client: Client) -> Api<ConfigMap> {
        Api::namespaced(client, "shop")
    }

    #[rstest]
    #[case::no_response("")]
    #[case::only_a_head("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n")]
    #[case::half_a_body(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n{\"metadata\""
    )]
    #[tokio::test]
    async fn unanswered_request_fails_at_its_deadline(#[case] text: &'static str) {
        let timeouts = Timeouts { request: Duration::from_millis(100), silence: NEVER, ping: NEVER };
        let config_maps = config_maps(client_of_silent_server(text, timeouts).await);
        let error = timeout(GUARD, config_maps.get("x")).await.expect("the request ends").unwrap_err();
        assert!(error.to_string().contains("has not responded within 100ms"), "{error}");
    }

    #[tokio::test]
    async fn unanswered_watch_fails_at_the_deadline() {
        let timeouts = Timeouts { request: Duration::from_millis(100), silence: NEVER, ping: NEVER };
        let config_maps = config_maps(client_of_silent_server("", timeouts).await);
        let started = timeout(GUARD, config_maps.watch(&WatchParams::default(), "0")).await;
        assert!(started.expect("the request ends").is_err());
    }

    /// Returns the first two events of a watch of a server that sends `chunk` and nothing more.
    async fn events_before_silence(chunk: &str) -> [Option<kube::Result<WatchEvent<ConfigMap>>>; 2] {
        let timeouts = Timeouts { request: NEVER, silence: Duration::from_millis(100), ping: NEVER };
        let response = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunk}");
        let config_maps = config_maps(client_of_silent_server(response, timeouts).await);
        let mut events = config_maps.watch(&WatchParams::default(), "7").await.unwrap().boxed();
        let mut next = async || timeout(GUARD, events.next()).await.expect("the watch ends");
        [next().await, next().await]
    }

    #[tokio::test]
    async fn a_watch_that_falls_silent_fails() {
        let bookmark = concat!(
            r#"{"type":"BOOKMARK","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"8"}}}"#,
            "\n"
        );
        let [first, second] = events_before_silence(&format!("{:x}\r\n{bookmark}\r\n", bookmark.len())).await;
        assert!(matches!(first, Some(Ok(WatchEvent::Bookmark(_)))), "{first:?}");
        assert!(matches!(second, Some(Err(_))), "{second:?}");
    }

    #[tokio::test]
    async fn watch_silent_from_its_start_expires() {
        let [first, second] = events_before_silence("").await;
        let Some(Ok(WatchEvent::Error(status))) = first else { panic!("{first:?}") };
        assert_eq!((status.code, status.reason.as_str()), (410, "Expired"));
        assert!(second.is_none(), "{second:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_outlasts_the_request_deadline() {
        let (service, mut server) = mock::pair::<Request<Body>, Response<_>>();
        let client = Client::new(
            layer(|service, request| send_within(Timeouts::default(), service, request)).layer(service),
            "default",
        );
        tokio::spawn(async move {
            let (_request, respond) = server.next_request().await.unwrap();
            let bookmarks = stream::iter(0..10).then(async |number| {
                tokio::time::sleep(Duration::from_secs(59)).await;
                let bookmark = format!(
                    r#"{{"type":"BOOKMARK","object":{{"kind":"ConfigMap","apiVersion":"v1","metadata":{{"resourceVersion":"{number}"}}}}}}"#
                );
                Ok::<_, BoxError>(Frame::data(Bytes::from(bookmark + "\n")))
            });
            respond.send_response(Response::new(StreamBody::new(Box::pin(bookmarks))));
        });
        let events = config_maps(client).watch(&WatchParams::default(), "0").await.unwrap();
        let events: Vec<WatchEvent<_>> = events.try_collect().await.unwrap();
        assert_eq!(events.len(), 10);
    }

    #[tokio::test]
    async fn connections_have_keepalive_probes() {
        let (_listener, address) = listener().await;
        let stream = tcp().call(format!("http://{address}").parse().unwrap()).await.unwrap().into_inner();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEPALIVE_TIME);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), KEEPALIVE_INTERVAL);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), KEEPALIVE_RETRIES);
        assert_eq!(u128::from(sockopt::tcp_user_timeout(&stream).unwrap()), USER_TIMEOUT.as_millis());
    }
}
