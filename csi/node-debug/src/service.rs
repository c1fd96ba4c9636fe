//! The gRPC service.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, async_trait};

use crate::cluster::{AllowedAccount, ApiServerAccess, MIN_LIFETIME};
use crate::conditions::{ConditionError, ConditionSubject, Conditions, Evaluation, NamedCondition};
use crate::logs::{Line, LoggedComponent, Logs, Position, Ring, Selection};
use crate::proto as wire;
use crate::proto::node_debug_server::NodeDebug;
use crate::state::StateReader;

/// Calls that may be in progress at the same time, of all clients together.
const MAX_CALLS: usize = 64;

/// About the bytes of log lines in one message.
const BATCH_BYTES: usize = 256 << 10;

/// The bytes of a state file in one message.
const STATE_CHUNK_BYTES: usize = 256 << 10;

/// The longest wait for a condition that a client may request.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// What the service serves.
#[derive(Clone, Debug)]
pub(crate) struct NodeDebugService {
    pub(crate) logs: Logs,
    conditions: Conditions,
    state: StateReader,
    subject: ConditionSubject,
    accounts: Arc<[AllowedAccount]>,
    max_lifetime: Duration,
    calls: Arc<Semaphore>,
    /// Ends streams and waits.
    stop: CancellationToken,
}

impl NodeDebugService {
    pub(crate) fn new(
        logs: Logs,
        subject: ConditionSubject,
        accounts: Vec<AllowedAccount>,
        max_lifetime: Duration,
        stop: CancellationToken,
    ) -> Self {
        Self {
            logs,
            conditions: Conditions::new(subject.clone()),
            state: StateReader::new(subject.data_dir.clone()),
            subject,
            accounts: accounts.into(),
            max_lifetime,
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            stop,
        }
    }

    fn admit(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.calls).try_acquire_owned().map_err(|error| {
            tracing::warn!(%error, "refused a call: {MAX_CALLS} are in progress");
            Status::resource_exhausted(format!(
                "{MAX_CALLS} calls are in progress; end another dbg, or repeat the command later"
            ))
        })
    }

    fn component(&self, name: &str) -> Result<&Arc<LoggedComponent>, Status> {
        self.logs.component(name).ok_or_else(|| {
            let known: Vec<&str> = self.logs.components().map(|component| component.name.as_str()).collect();
            Status::not_found(match known.as_slice() {
                [] => "node-debug keeps no logs; start it with --log NAME=SOURCE".to_owned(),
                known => format!("there is no component {name:?}; the components are {}", known.join(", ")),
            })
        })
    }

    fn account(&self, name: &str) -> Result<&AllowedAccount, Status> {
        let unknown = || {
            let known: Vec<&str> = self.accounts.iter().map(|account| account.name.as_str()).collect();
            Status::not_found(format!(
                "there is no service account {name:?}; the service accounts are {}",
                known.join(", ")
            ))
        };
        match (self.accounts.first(), name) {
            (None, _) => Err(Status::failed_precondition(
                "node-debug issues no kubeconfigs; start it with --kubeconfig and --kubeconfig-service-account",
            )),
            (Some(first), "") => Ok(first),
            _ => self.accounts.iter().find(|account| account.name == name).ok_or_else(unknown),
        }
    }

    fn cluster(&self) -> Result<&ApiServerAccess, Status> {
        let missing = || Status::failed_precondition("node-debug was started without --kubeconfig");
        self.subject.cluster.as_ref().ok_or_else(missing)
    }
}

#[async_trait]
impl NodeDebug for NodeDebugService {
    async fn describe(
        &self,
        _: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        let component = |component: &Arc<LoggedComponent>| {
            let counts = component.ring.counts();
            wire::Component {
                name: component.name.clone(),
                source: component.source.to_string(),
                problem: component.problem().unwrap_or_default(),
                lines: counts.lines,
                bytes: counts.bytes,
                dropped_lines: counts.dropped,
            }
        };
        let condition = |condition: NamedCondition| wire::KnownCondition {
            name: condition.name().to_owned(),
            description: condition.description().to_owned(),
            argument: condition.argument().to_owned(),
        };
        Ok(Response::new(wire::DescribeResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            components: self.logs.components().map(component).collect(),
            conditions: NamedCondition::ALL.map(condition).into(),
            service_accounts: self.accounts.iter().map(|account| account.name.clone()).collect(),
        }))
    }

    type LogsStream = BoxStream<'static, Result<wire::LogsResponse, Status>>;

    async fn logs(&self, request: Request<wire::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let permit = self.admit()?;
        let request = request.into_inner();
        let component = self.component(&request.component)?;
        let reader = LogReader::new(&component.ring, &request, self.stop.clone(), permit)?;
        let batches = stream::unfold(reader, |mut reader| async { Some((Ok(reader.next().await?), reader)) });
        Ok(Response::new(batches.boxed()))
    }

    async fn condition(
        &self,
        request: Request<wire::ConditionRequest>,
    ) -> Result<Response<wire::ConditionResponse>, Status> {
        let _permit = self.admit()?;
        let wire::ConditionRequest { name, arguments } = request.into_inner();
        response(self.conditions.evaluate(&name, &arguments).await)
    }

    async fn wait_condition(
        &self,
        request: Request<wire::WaitConditionRequest>,
    ) -> Result<Response<wire::ConditionResponse>, Status> {
        let _permit = self.admit()?;
        let wire::WaitConditionRequest { name, arguments, timeout_ms } = request.into_inner();
        let timeout = Duration::from_millis(timeout_ms);
        if timeout > MAX_WAIT {
            return Err(Status::invalid_argument(format!(
                "the timeout must not be longer than {MAX_WAIT:?}"
            )));
        }
        let waiting = self.conditions.wait(&name, &arguments, Instant::now() + timeout);
        let stopped = || Err(Status::unavailable("node-debug is stopping"));
        self.stop.run_until_cancelled(waiting).await.map_or_else(stopped, response)
    }

    async fn kubeconfig(
        &self,
        request: Request<wire::KubeconfigRequest>,
    ) -> Result<Response<wire::KubeconfigResponse>, Status> {
        let _permit = self.admit()?;
        let wire::KubeconfigRequest { service_account, lifetime_seconds } = request.into_inner();
        let account = self.account(&service_account)?;
        let lifetime = match lifetime_seconds {
            0 => MIN_LIFETIME,
            seconds => Duration::from_secs(seconds),
        };
        if !(MIN_LIFETIME..=self.max_lifetime).contains(&lifetime) {
            let (shortest, longest) = (MIN_LIFETIME.as_secs(), self.max_lifetime.as_secs());
            return Err(Status::invalid_argument(format!(
                "the lifetime must be from {shortest} s to {longest} s (--kubeconfig-max-lifetime of node-debug)"
            )));
        }
        let issued = self.cluster()?.issue(account, lifetime).await;
        let issued = issued.map_err(|error| Status::unavailable(format!("{error:#}")))?;
        tracing::info!(
            account = format!("{}/{}", account.namespace, account.account),
            expires = issued.expires,
            "issued a kubeconfig"
        );
        Ok(Response::new(wire::KubeconfigResponse {
            server: issued.server,
            certificate_authority: issued.authority.unwrap_or_default(),
            namespace: account.namespace.clone(),
            token: issued.token,
            expires: issued.expires,
        }))
    }

    type StateStream = BoxStream<'static, Result<wire::StateResponse, Status>>;

    async fn state(&self, _: Request<wire::StateRequest>) -> Result<Response<Self::StateStream>, Status> {
        let permit = self.admit()?;
        let responses = self.state.read().flat_map(|file| {
            let chunks: Vec<_> = file.content.chunks(STATE_CHUNK_BYTES).map(<[u8]>::to_vec).collect();
            let response = move |content| Ok(wire::StateResponse { name: file.name.to_owned(), content });
            stream::iter(chunks.into_iter().map(response))
        });
        let responses = responses.take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(
            responses
                .inspect(move |_| {
                    let _permit = &permit;
                })
                .boxed(),
        ))
    }
}

fn response(
    evaluated: Result<Evaluation, ConditionError>,
) -> Result<Response<wire::ConditionResponse>, Status> {
    match evaluated {
        Ok(Evaluation { met, detail }) => Ok(Response::new(wire::ConditionResponse { met, detail })),
        Err(error @ ConditionError::Unknown { .. }) => Err(Status::not_found(error.to_string())),
        Err(error @ ConditionError::Arguments { .. }) => Err(Status::invalid_argument(error.to_string())),
        Err(error @ ConditionError::NotConfigured { .. }) => {
            Err(Status::failed_precondition(error.to_string()))
        }
    }
}

/// One call of Logs.
struct LogReader {
    ring: Arc<Ring>,
    selection: Selection,
    position: Position,
    /// The position at which the call ends. `None` if it follows.
    end: Option<Position>,
    newest: watch::Receiver<Position>,
    stop: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl LogReader {
    fn new(
        ring: &Arc<Ring>,
        request: &wire::LogsRequest,
        stop: CancellationToken,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, Status> {
        let minimum_level = match request.minimum_level() {
            wire::Level::Unspecified => None,
            level => Some(level),
        };
        let since = request.since_unix_ms.map(Timestamp::from_millisecond).transpose();
        let since =
            since.map_err(|error| Status::invalid_argument(format!("the time is out of range: {error}")))?;
        let selection = Selection { since, minimum_level };
        let newest = ring.subscribe();
        let (position, newest_end) = ring.tail(request.lines, selection);
        let end = (!request.follow).then_some(newest_end);
        Ok(Self { ring: Arc::clone(ring), selection, position, end, newest, stop, _permit: permit })
    }

    /// Waits for lines. Returns `None` at the end.
    async fn next(&mut self) -> Option<wire::LogsResponse> {
        loop {
            self.newest.mark_unchanged();
            let end = self.end.unwrap_or(Position::MAX);
            let batch = self.ring.read(self.position, end, self.selection, BATCH_BYTES);
            let is_progress = batch.next > self.position;
            self.position = batch.next;
            let dropped = (batch.dropped > 0).then(|| marker(batch.dropped));
            let lines: Vec<wire::LogLine> =
                dropped.into_iter().chain(batch.lines.into_iter().map(log_line)).collect();
            if !lines.is_empty() {
                return Some(wire::LogsResponse { lines });
            }
            if is_progress {
                if self.stop.is_cancelled() {
                    return None;
                }
                // The next part of the ring may have no line of the selection either.
                tokio::task::yield_now().await;
                continue;
            }
            if self.end.is_some() {
                return None;
            }
            let changed = self.stop.run_until_cancelled(self.newest.changed()).await;
            // The ring lives as long as the reader.
            changed?.ok()?;
        }
    }
}

fn marker(dropped_lines: u64) -> wire::LogLine {
    wire::LogLine { unix_ms: Timestamp::now().as_millisecond(), dropped_lines, ..wire::LogLine::default() }
}

fn log_line(line: Line) -> wire::LogLine {
    let Line { time, level, text, cut_bytes, lost_lines } = line;
    wire::LogLine {
        unix_ms: time.as_millisecond(),
        level: level.into(),
        text,
        cut_bytes,
        dropped_lines: lost_lines,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_BYTES: usize = 64 << 10;

    fn service() -> NodeDebugService {
        let logs = Logs::new(vec!["a=/nonexistent".parse().unwrap()], MAX_BYTES);
        let subject = ConditionSubject::default();
        NodeDebugService::new(logs, subject, Vec::new(), Duration::from_secs(3600), CancellationToken::new())
    }

    fn follow() -> Request<wire::LogsRequest> {
        Request::new(wire::LogsRequest { component: "a".to_owned(), follow: true, ..Default::default() })
    }

    fn push(service: &NodeDebugService, text: &str) {
        let line = crate::logs::RawLine { text: text.as_bytes().to_vec(), cut_bytes: 0 };
        service.logs.component("a").unwrap().ring.push(line, Timestamp::now());
    }

    /// The newest lines follow the number of dropped lines.
    #[tokio::test]
    async fn slow_reader_gets_number_of_drops() {
        const COUNT: u64 = 5_000;
        let service = service();
        push(&service, "first");
        let mut stream = service.logs(follow()).await.unwrap().into_inner();
        let first = stream.next().await.unwrap().unwrap();
        assert_eq!(first.lines[0].text, b"first");
        // Nothing waits for the reader.
        for number in 0..COUNT {
            push(&service, &format!("line {number}"));
        }
        let mut lines = Vec::new();
        while lines
            .last()
            .is_none_or(|line: &wire::LogLine| line.text != format!("line {}", COUNT - 1).as_bytes())
        {
            lines.extend(stream.next().await.unwrap().unwrap().lines);
        }
        let dropped = lines[0].dropped_lines;
        assert!(dropped > 0 && lines[0].text.is_empty(), "{:?}", lines[0]);
        assert_eq!(dropped + lines.len() as u64 - 1, COUNT);
    }

    #[tokio::test]
    async fn stream_ends_when_service_stops() {
        let service = service();
        let mut stream = service.logs(follow()).await.unwrap().into_inner();
        service.stop.cancel();
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn calls_beyond_the_limit_are_refused() {
        let service = service();
        let mut open = Vec::new();
        for _ in 0..MAX_CALLS {
            open.push(service.logs(follow()).await.unwrap());
        }
        let refused = service.logs(follow()).await.err().unwrap();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        open.pop();
        assert!(service.logs(follow()).await.is_ok());
    }
}
