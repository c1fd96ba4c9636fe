//! The gRPC service.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Error;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, async_trait};

use crate::args::Args;
use crate::cluster::{AllowedAccount, ApiServerAccess};
use crate::conditions::{self, Conditions};
use crate::disk::Disk;
use crate::logs::{self, LogSource};
use crate::proto as wire;
use crate::proto::node_debug_server::NodeDebug;
use crate::state::State;

/// Calls that may read logs concurrently. Each holds up to 8 MiB.
const MAX_LOG_CALLS: usize = 16;

/// What the service serves.
#[derive(Debug)]
pub(crate) struct NodeDebugService {
    logs: Vec<LogSource>,
    log_calls: Arc<Semaphore>,
    conditions: Conditions,
    state: State,
    account: Option<AllowedAccount>,
    /// Ends streams and waits.
    stop: CancellationToken,
}

impl NodeDebugService {
    pub(crate) fn new(args: Args, stop: CancellationToken) -> Self {
        let state = State::new(args.data_dir.clone());
        let conditions = Conditions {
            driver_name: args.driver_name,
            registration_dir: args.registration_dir,
            data_dir: args.data_dir,
            node_name: args.node_name,
            cluster: args.kubeconfig.map(ApiServerAccess::new),
            disk: Disk::default(),
        };
        Self {
            logs: args.logs,
            log_calls: Arc::new(Semaphore::new(MAX_LOG_CALLS)),
            conditions,
            state,
            account: args.service_account,
            stop,
        }
    }

    fn log(&self, name: &str) -> Result<&LogSource, Status> {
        self.logs.iter().find(|log| log.name == name).ok_or_else(|| {
            let known: Vec<&str> = self.logs.iter().map(|log| log.name.as_str()).collect();
            Status::not_found(match known.as_slice() {
                [] => "node-debug reads no logs; start it with --log NAME=SOURCE".to_owned(),
                known => format!("there is no component {name:?}; the components are {}", known.join(", ")),
            })
        })
    }

    /// Ends a stream when the service stops.
    fn until_stop<T: Send + 'static>(
        &self,
        responses: impl futures::Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> Response<BoxStream<'static, Result<T, Status>>> {
        Response::new(responses.take_until(self.stop.clone().cancelled_owned()).boxed())
    }
}

#[async_trait]
impl NodeDebug for NodeDebugService {
    async fn describe(
        &self,
        _: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        let component =
            |log: &LogSource| wire::Component { name: log.name.clone(), source: log.source.to_string() };
        Ok(Response::new(wire::DescribeResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            components: self.logs.iter().map(component).collect(),
            conditions: conditions::known(),
        }))
    }

    type LogsStream = BoxStream<'static, Result<wire::LogsResponse, Status>>;

    async fn logs(&self, request: Request<wire::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let wire::LogsRequest { component, lines, follow } = request.into_inner();
        let log = self.log(&component)?;
        let permit = Arc::clone(&self.log_calls).try_acquire_owned().map_err(|_none_left| {
            Status::resource_exhausted(format!(
                "{MAX_LOG_CALLS} calls read logs; end one of them, such as a dbg logs --follow. A disk that hangs also keeps them"
            ))
        })?;
        let content = logs::read(&log.source, lines, follow, permit);
        let responses = content.map_ok(|content| wire::LogsResponse { content });
        Ok(self.until_stop(responses.map_err(unavailable)))
    }

    async fn condition(
        &self,
        request: Request<wire::ConditionRequest>,
    ) -> Result<Response<wire::ConditionResponse>, Status> {
        let wire::ConditionRequest { name, argument, wait_ms } = request.into_inner();
        let Some(wait_ms) = wait_ms else {
            return self.conditions.evaluate(&name, &argument).await.map(Response::new);
        };
        let deadline = Instant::now() + Duration::from_millis(wait_ms);
        let waiting = self.conditions.wait(&name, &argument, deadline);
        let stopped = || Err(Status::unavailable("node-debug is stopping"));
        self.stop.run_until_cancelled(waiting).await.unwrap_or_else(stopped).map(Response::new)
    }

    async fn kubeconfig(
        &self,
        _: Request<wire::KubeconfigRequest>,
    ) -> Result<Response<wire::KubeconfigResponse>, Status> {
        let (Some(cluster), Some(account)) = (&self.conditions.cluster, &self.account) else {
            return Err(Status::failed_precondition(
                "node-debug issues no kubeconfigs; start it with --kubeconfig and --kubeconfig-service-account",
            ));
        };
        let (issued, expiry) = cluster.issue(account).await.map_err(unavailable)?;
        let AllowedAccount { namespace, account } = account;
        tracing::info!(account = format!("{namespace}/{account}"), %expiry, "issued a kubeconfig");
        Ok(Response::new(issued))
    }

    type StateStream = BoxStream<'static, Result<wire::StateResponse, Status>>;

    async fn state(&self, _: Request<wire::StateRequest>) -> Result<Response<Self::StateStream>, Status> {
        let responses = self.state.read().flat_map(|file| {
            let chunks: Vec<_> = file.content.chunks(logs::CHUNK_BYTES).map(<[u8]>::to_vec).collect();
            let response = move |content| Ok(wire::StateResponse { name: file.name.to_owned(), content });
            stream::iter(chunks.into_iter().map(response))
        });
        Ok(self.until_stop(responses))
    }
}

fn unavailable(error: Error) -> Status {
    Status::unavailable(format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    async fn follow(
        service: &NodeDebugService,
    ) -> Result<Response<<NodeDebugService as NodeDebug>::LogsStream>, Status> {
        let request =
            wire::LogsRequest { component: "a".to_owned(), follow: true, ..wire::LogsRequest::default() };
        service.logs(Request::new(request)).await
    }

    /// The file of the log does not exist, so the call waits for it.
    #[tokio::test]
    async fn stream_ends_when_service_stops() {
        let args = Args::parse_from(["node-debug", "--log=a=/nonexistent"]);
        let service = NodeDebugService::new(args, CancellationToken::new());
        let mut stream = follow(&service).await.unwrap().into_inner();
        assert!(futures::poll!(stream.next()).is_pending());
        service.stop.cancel();
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn number_of_log_calls_is_limited() {
        let args = Args::parse_from(["node-debug", "--log=a=/nonexistent"]);
        let service = NodeDebugService::new(args, CancellationToken::new());
        let calls = futures::future::join_all((0..MAX_LOG_CALLS).map(|_| follow(&service))).await;
        assert!(calls.iter().all(Result::is_ok));
        assert_eq!(follow(&service).await.err().unwrap().code(), tonic::Code::ResourceExhausted);
        drop(calls);
        assert!(follow(&service).await.is_ok());
    }
}
