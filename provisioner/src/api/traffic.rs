//! The requests to the API server: how many of them there were, and whether the latest one was answered.
//!
//! The layers of tower-http that observe requests give a callback only the span of its request, not the verb and the resource.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use http_body_util::combinators::MapFrame;
use hyper::body::{Body as HttpBody, Frame};
use kube::client::Body;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use service::Gauges;
use tower::{BoxError, Service, ServiceExt};

use crate::api::request::ApiRequest;

/// Requests by verb, resource and HTTP status.
type Requests = Family<[(&'static str, String); 3], Counter>;

/// Unix times by resource.
type Times = Family<[(&'static str, String); 1], Gauge>;

/// Whether the API server answered a request. The error says why not.
pub(crate) type RequestOutcome = Result<(), String>;

/// All requests since the process started, and the outcome of the latest one.
///
/// What a watch delivers is an outcome too. The API server sends a bookmark about once a minute, and a watch that delivers nothing
/// for several minutes ends and is begun again. So a process that has nothing to do knows whether the API server answers,
/// without a request for that purpose. A refused token is the exception: the API server checks it once for each request, so the
/// watches that it accepted continue. Only the response to another request shows that the token is accepted again.
#[derive(Clone, Debug, Default)]
pub(crate) struct ApiTraffic {
    reads: Requests,
    writes: Requests,
    /// When the watches of each resource last delivered something.
    watched: Times,
    latest: Arc<Mutex<Option<LatestOutcome>>>,
}

#[derive(Debug)]
struct LatestOutcome {
    outcome: RequestOutcome,
    refuses_token: bool,
}

impl ApiTraffic {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Reads from the API server, by HTTP status; without a status, there was no response";
        registry.register("api_reads", help, self.reads.clone());
        let help = "Writes to the API server, by HTTP status; without a status, there was no response";
        registry.register("api_writes", help, self.writes.clone());
        let help = "Unix time at which a watch last delivered an event or a bookmark";
        registry.register_with_unit("watch_delivered_timestamp", help, Unit::Seconds, self.watched.clone());
    }

    /// Registers whether the API server answers, once it is known.
    pub(crate) fn register_latest(&self, registry: &mut Registry) {
        if let Some(outcome) = self.latest() {
            let help = "1 if the API server answered the latest request, or a watch delivered something since, else 0";
            registry.count("api_server_reachable", help, u64::from(outcome.is_ok()));
        }
    }

    /// Returns the latest outcome, or `None` before the first.
    pub(crate) fn latest(&self) -> Option<RequestOutcome> {
        self.latest.lock().as_ref().map(|latest| latest.outcome.clone())
    }

    #[cfg(test)]
    pub(crate) fn record(&self, outcome: RequestOutcome) {
        *self.latest.lock() = Some(LatestOutcome { outcome, refuses_token: false });
    }

    /// Records that a response delivered something. That of a watch lasts for minutes.
    pub(crate) fn delivered(&self, request: &ApiRequest) {
        if request.verb == "watch" {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
            self.watched.get_or_create(&[("resource", request.resource.clone())]).set(now);
        }
        let mut latest = self.latest.lock();
        if !latest.as_ref().is_some_and(|latest| latest.refuses_token) {
            *latest = Some(LatestOutcome { outcome: Ok(()), refuses_token: false });
        }
    }

    /// Sends a request, counts it, and records its outcome.
    pub(crate) async fn observe<S, B>(
        self,
        service: S,
        request: Request<Body>,
    ) -> Result<Response<ObservedBody<B, B::Data>>, BoxError>
    where
        S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
        B: HttpBody,
    {
        let api_request = ApiRequest::of(request.method(), request.uri());
        let response = service.oneshot(request).await;
        let status = response.as_ref().map(Response::status).map_err(ToString::to_string);
        let is_success = status.as_ref().is_ok_and(StatusCode::is_success);
        self.ended(api_request.clone(), status);
        let (head, body) = response?.into_parts();
        let body: ObservedBody<B, B::Data> = body.map_frame(Box::new(move |frame| {
            if is_success {
                self.delivered(&api_request);
            }
            frame
        }));
        Ok(Response::from_parts(head, body))
    }

    /// Counts a request, and records its outcome.
    pub(crate) fn ended(&self, request: ApiRequest, status: Result<StatusCode, String>) {
        let requests = if request.is_write() { &self.writes } else { &self.reads };
        let ApiRequest { verb, resource } = request;
        let code = status.as_ref().map(|status| status.as_str().to_owned()).unwrap_or_default();
        let refuses_token = status == Ok(StatusCode::UNAUTHORIZED);
        let outcome = status.and_then(|status| answered(verb, &resource, status));
        *self.latest.lock() = Some(LatestOutcome { outcome, refuses_token });
        requests.get_or_create(&[("verb", verb.to_owned()), ("resource", resource), ("code", code)]).inc();
    }
}

/// A refusal is an answer, unless it concerns each request of this process.
fn answered(verb: &str, resource: &str, status: StatusCode) -> RequestOutcome {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::TOO_MANY_REQUESTS => {}
        _ if status.is_server_error() => {}
        _ => return Ok(()),
    }
    Err(format!("{verb} {resource}: {status}"))
}

/// A body each of whose frames is an outcome.
type ObservedBody<B, Data> = MapFrame<B, Box<dyn FnMut(Frame<Data>) -> Frame<Data> + Send>>;

#[cfg(test)]
mod tests {
    use futures::{FutureExt, StreamExt, stream};
    use http::Method;
    use http_body_util::StreamBody;
    use hyper::body::Bytes;
    use rstest::rstest;
    use service::documentation;
    use tower_test::mock;

    use super::*;

    const VOLUME: &str = "https://api.test/api/v1/persistentvolumes/pvc-1";

    /// Sends a request whose response has this status and this body. Returns the response.
    async fn responded<B: HttpBody + Send + 'static>(
        traffic: &ApiTraffic,
        (method, uri): (Method, &str),
        response: Result<Response<B>, &'static str>,
    ) -> Result<Response<ObservedBody<B, B::Data>>, BoxError> {
        let (service, mut server) = mock::pair::<Request<Body>, Response<B>>();
        let request = Request::builder().method(method).uri(uri).body(Body::empty()).unwrap();
        let responding = async {
            let (_request, respond) = server.next_request().await.unwrap();
            match response {
                Ok(response) => respond.send_response(response),
                Err(error) => respond.send_error(error),
            }
        };
        tokio::join!(traffic.clone().observe(service, request), responding).0
    }

    fn empty(status: u16) -> Result<Response<Body>, &'static str> {
        Ok(Response::builder().status(status).body(Body::empty()).unwrap())
    }

    /// Returns a body of one frame.
    fn delivering() -> impl HttpBody<Data = Bytes, Error = BoxError> + Send + Unpin + 'static {
        let frame = Frame::data(Bytes::from_static(b"{}"));
        StreamBody::new(stream::iter([Ok::<_, BoxError>(frame)]))
    }

    #[tokio::test]
    async fn requests_are_counted_by_status() {
        let traffic = ApiTraffic::default();
        for (method, status) in [(Method::GET, 200), (Method::PATCH, 409), (Method::DELETE, 200)] {
            let response = responded(&traffic, (method, VOLUME), empty(status)).await.unwrap();
            assert_eq!(response.status(), status);
        }
        let lost: Result<Response<Body>, _> = Err("connection reset");
        assert!(responded(&traffic, (Method::DELETE, VOLUME), lost).await.is_err());
        let mut registry = Registry::default();
        traffic.register(&mut registry);
        let text = documentation::page(&registry);
        let mut lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            [
                r#"api_reads_total{verb="get",resource="persistentvolumes",code="200"} 1"#,
                r#"api_writes_total{verb="delete",resource="persistentvolumes",code=""} 1"#,
                r#"api_writes_total{verb="delete",resource="persistentvolumes",code="200"} 1"#,
                r#"api_writes_total{verb="patch",resource="persistentvolumes",code="409"} 1"#,
            ]
        );
    }

    #[rstest]
    #[case::success(empty(200), Ok(()))]
    #[case::missing_object(empty(404), Ok(()))]
    #[case::conflict(empty(409), Ok(()))]
    #[case::forbidden(empty(403), Ok(()))]
    #[case::expired_token(empty(401), Err("get persistentvolumes: 401 Unauthorized"))]
    #[case::overload(empty(429), Err("get persistentvolumes: 429 Too Many Requests"))]
    #[case::etcd_is_away(empty(500), Err("get persistentvolumes: 500 Internal Server Error"))]
    #[case::no_response(Err("connection reset"), Err("connection reset"))]
    #[tokio::test]
    async fn the_latest_response_is_the_outcome(
        #[case] response: Result<Response<Body>, &'static str>,
        #[case] expected: Result<(), &str>,
    ) {
        let traffic = ApiTraffic::default();
        assert_eq!(traffic.latest(), None);
        traffic.record(if expected.is_ok() { Err("before".to_owned()) } else { Ok(()) });
        drop(responded(&traffic, (Method::GET, VOLUME), response).await);
        assert_eq!(traffic.latest(), Some(expected.map_err(ToOwned::to_owned)));
    }

    #[rstest]
    #[case::bookmark(200, Ok(()))]
    #[case::text_of_an_error(503, Err("lost"))]
    #[tokio::test]
    async fn watch_delivery_is_an_outcome(#[case] status: u16, #[case] expected: Result<(), &str>) {
        let traffic = ApiTraffic::default();
        let response = Response::builder().status(status).body(delivering()).unwrap();
        let response = responded(&traffic, (Method::GET, VOLUME), Ok(response)).await.unwrap();
        traffic.record(Err("lost".to_owned()));
        let mut body = response.into_body().into_data_stream();
        assert!(body.next().now_or_never().flatten().unwrap().is_ok());
        assert_eq!(traffic.latest(), Some(expected.map_err(ToOwned::to_owned)));
    }

    #[rstest]
    #[case::watch("https://api.test/api/v1/persistentvolumes?watch=true", true)]
    #[case::read(VOLUME, false)]
    #[tokio::test]
    async fn time_of_latest_delivery_is_recorded(#[case] uri: &str, #[case] recorded: bool) {
        let traffic = ApiTraffic::default();
        let response =
            responded(&traffic, (Method::GET, uri), Ok(Response::new(delivering()))).await.unwrap();
        let time = |traffic: &ApiTraffic| {
            let resource = [("resource", "persistentvolumes".to_owned())];
            traffic.watched.get(&resource).map(|time| time.get())
        };
        assert_eq!(time(&traffic), None, "the head of the response is no event");
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(response.into_body().into_data_stream().next().await.unwrap().is_ok());
        let time = time(&traffic).map(|time| time.unsigned_abs());
        assert_eq!(time.is_some_and(|time| time >= before), recorded, "{time:?}");
    }

    /// Watches that began with a valid token continue.
    #[tokio::test]
    async fn refused_token_lasts_until_accepted_request() {
        let traffic = ApiTraffic::default();
        let watch =
            responded(&traffic, (Method::GET, VOLUME), Ok(Response::new(delivering()))).await.unwrap();
        responded(&traffic, (Method::GET, VOLUME), empty(401)).await.unwrap();
        assert!(watch.into_body().into_data_stream().next().await.unwrap().is_ok());
        assert_eq!(traffic.latest(), Some(Err("get persistentvolumes: 401 Unauthorized".to_owned())));
        responded(&traffic, (Method::GET, VOLUME), empty(404)).await.unwrap();
        assert_eq!(traffic.latest(), Some(Ok(())));
    }
}
