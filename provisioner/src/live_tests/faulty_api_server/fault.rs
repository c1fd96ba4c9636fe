//! The faults of an API server, and of the load balancer in front of it.

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use hyper::body::Bytes;
use serde_json::json;

use super::call::Call;

/// The fate of a request, or of the next event of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::live_tests) enum Fault {
    /// The request gets no response, and the API server does not receive it. The connection stays open. A watch delivers nothing
    /// more.
    Silence,
    /// The API server receives the request once a rule no longer has this fault for it. Not for the events of a watch.
    Late,
    /// The connection is closed before the API server receives the request. A watch ends before its next event.
    Disconnect,
    /// The API server carries the request out, and the connection is closed in the middle of the response, or of the event.
    HalfBody,
    /// The API server carries the request out, and the response is complete but for the end of its JSON.
    TruncatedJson,
    /// The API server carries the write out, and responds with the status 500.
    LostResponse,
    /// The load balancer has no such page.
    PlainNotFound,
    BadGateway,
    Unavailable,
    /// The API server has too many requests, and says when to retry.
    TooManyRequests,
    Conflict,
    /// The resource version, or the next page of a list, is too old.
    Gone,
    ExpiredToken,
    /// Another API server returns an older list than the client has seen. The watch that follows repeats all events since then.
    StaleList,
    RepeatedEvent,
}

impl Fault {
    /// The faults of a request that reads one object. None of them proves that the object is absent.
    pub(in crate::live_tests) const OF_READS: [Fault; 10] = [
        Fault::PlainNotFound,
        Fault::BadGateway,
        Fault::Unavailable,
        Fault::TooManyRequests,
        Fault::Gone,
        Fault::ExpiredToken,
        Fault::Disconnect,
        Fault::HalfBody,
        Fault::TruncatedJson,
        Fault::Silence,
    ];

    pub(in crate::live_tests) const OF_WRITES: [Fault; 11] = [
        Fault::PlainNotFound,
        Fault::BadGateway,
        Fault::Unavailable,
        Fault::TooManyRequests,
        Fault::Conflict,
        Fault::LostResponse,
        Fault::ExpiredToken,
        Fault::Disconnect,
        Fault::HalfBody,
        Fault::TruncatedJson,
        Fault::Silence,
    ];

    pub(in crate::live_tests) const OF_WATCHES: [Fault; 5] =
        [Fault::Silence, Fault::Disconnect, Fault::HalfBody, Fault::Gone, Fault::RepeatedEvent];

    /// Returns `true` if the API server receives the request.
    pub(super) fn is_forwarded(self) -> bool {
        matches!(self, Fault::HalfBody | Fault::TruncatedJson | Fault::LostResponse | Fault::ExpiredToken)
    }

    /// Returns the response of a fault that consists of a response only.
    pub(super) fn response(self, call: &Call) -> Option<Response<Bytes>> {
        Some(match self {
            Fault::PlainNotFound => page(StatusCode::NOT_FOUND, "text/plain", "404 page not found\n"),
            Fault::BadGateway => page(StatusCode::BAD_GATEWAY, "text/html", "<html>Bad Gateway</html>"),
            Fault::Unavailable => {
                page(StatusCode::SERVICE_UNAVAILABLE, "text/html", "<html>no server is available</html>")
            }
            Fault::TooManyRequests => {
                let text = "too many requests, please try again later";
                let mut response = status(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", text);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                response
            }
            Fault::Conflict => {
                let text = format!(
                    "Operation cannot be fulfilled on {} {:?}: the object has been modified",
                    call.resource, call.name
                );
                status(StatusCode::CONFLICT, "Conflict", &text)
            }
            Fault::Gone => status(StatusCode::GONE, "Expired", "too old resource version"),
            Fault::LostResponse => {
                status(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "etcdserver: request timed out")
            }
            _ => return None,
        })
    }

    /// Returns the event with which a watch ends because of this fault.
    pub(super) fn last_event(self) -> Option<Bytes> {
        (self == Fault::Gone).then(|| {
            let object = failure(StatusCode::GONE, "Expired", "too old resource version");
            Bytes::from(format!("{}\n", json!({"type": "ERROR", "object": object})))
        })
    }
}

fn page(status: StatusCode, content_type: &'static str, text: impl Into<Bytes>) -> Response<Bytes> {
    let mut response = Response::new(text.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn status(status: StatusCode, reason: &str, message: &str) -> Response<Bytes> {
    page(status, "application/json", failure(status, reason, message).to_string())
}

fn failure(status: StatusCode, reason: &str, message: &str) -> serde_json::Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status.as_u16(),
        "reason": reason, "message": message,
    })
}
