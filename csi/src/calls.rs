//! Counts and times the gRPC calls of all services.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use csi_wire::METHODS;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tonic::Code;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::NamedService;

/// The bucket limits in seconds. A read-only call takes half a millisecond. A call that waits for a disk
/// takes up to the kubelet's timeout.
const BUCKETS: [f64; 13] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0];

/// The label of methods that do not exist, so that a client cannot create time series.
const OTHER: &str = "other";

type ByMethod = [(&'static str, &'static str); 1];
type ByMethodAndCode = [(&'static str, &'static str); 2];

/// The statistics of the gRPC calls of all services since the start of the process, whatever their result.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    ended: Family<ByMethodAndCode, Counter>,
    took: Family<ByMethod, Histogram, fn() -> Histogram>,
    in_progress: Gauge,
}

impl Calls {
    pub(crate) fn new() -> Self {
        Self {
            ended: Family::default(),
            took: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            in_progress: Gauge::default(),
        }
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("rpcs", "Calls that have ended, by method and gRPC code", self.ended.clone());
        registry.register_with_unit(
            "rpc_duration",
            "How long calls took, by method",
            Unit::Seconds,
            self.took.clone(),
        );
        registry.register("rpcs_in_progress", "Calls that have not ended", self.in_progress.clone());
    }

    fn start(&self, path: &str) -> CallInProgress {
        let name = path.rsplit('/').next().unwrap_or_default();
        let method = METHODS.iter().find(|method| **method == name).copied().unwrap_or(OTHER);
        self.in_progress.inc();
        // The code if the client disconnects: the runtime then drops the call before the service responds.
        CallInProgress { calls: self.clone(), method, started: Instant::now(), code: Code::Cancelled }
    }

    fn record(&self, method: &'static str, code: Code, duration: Duration) {
        self.in_progress.dec();
        self.ended.get_or_create(&[("method", method), ("code", name_of(code))]).inc();
        self.took.get_or_create(&[("method", method)]).observe(duration.as_secs_f64());
    }
}

struct CallInProgress {
    calls: Calls,
    method: &'static str,
    started: Instant,
    code: Code,
}

impl CallInProgress {
    fn end(mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for CallInProgress {
    fn drop(&mut self) {
        self.calls.record(self.method, self.code, self.started.elapsed());
    }
}

/// A gRPC service whose calls are counted.
#[derive(Clone, Debug)]
pub(crate) struct Metered<S> {
    service: S,
    calls: Calls,
}

impl<S> Metered<S> {
    pub(crate) fn new(service: S, calls: &Calls) -> Self {
        Self { service, calls: calls.clone() }
    }
}

impl<S: NamedService> NamedService for Metered<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, Request, ResBody> Service<http::Request<Request>> for Metered<S>
where
    S: Service<http::Request<Request>, Response = http::Response<ResBody>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Request>) -> Self::Future {
        let call = self.calls.start(request.uri().path());
        let response = self.service.call(request);
        Box::pin(async move {
            let Ok(response) = response.await;
            // An error is in the headers of the response. A response with a message has its code in the trailers, and
            // the code is OK.
            let status = response.headers().get("grpc-status");
            call.end(status.map_or(Code::Ok, |status| Code::from_bytes(status.as_bytes())));
            Ok(response)
        })
    }
}

/// Returns the spelling that other CSI drivers and the kubelet use.
fn name_of(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use service::documentation;

    use super::*;

    fn text(calls: &Calls) -> String {
        let mut registry = Registry::default();
        calls.register(&mut registry);
        documentation::page(&registry)
    }

    /// They are also counted by status code, and unknown methods are counted together.
    #[test]
    fn calls_are_counted_by_method() {
        let calls = Calls::new();
        let call = calls.start("/csi.v1.Node/NodePublishVolume");
        assert!(text(&calls).contains("rpcs_in_progress 1\n"));
        call.end(Code::NotFound);
        for made_up in ["/csi.v1.Node/A", "/csi.v1.Node/B", "", "/"] {
            drop(calls.start(made_up));
        }
        let text = text(&calls);
        for line in [
            r#"rpcs_total{method="NodePublishVolume",code="NotFound"} 1"#,
            r#"rpcs_total{method="other",code="Canceled"} 4"#,
            r#"rpc_duration_seconds_count{method="NodePublishVolume"} 1"#,
            "rpcs_in_progress 0",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} is not in\n{text}");
        }
    }
}
