//! The events of a watch, one line of JSON each, with the faults that befall them.

use std::io;
use std::time::Duration;

use futures::{Stream, TryStreamExt, stream};
use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame, Incoming};
use serde_json::{Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, Lines};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::io::StreamReader;

use super::call::Call;
use super::{Fault, ProxyState, Rule, cut};

/// The interval of bookmarks. The API server sends one each minute; the tests shorten the deadlines of the provisioner as much.
const BOOKMARK_INTERVAL: Duration = Duration::from_millis(500);

type Chunk = io::Result<Frame<Bytes>>;

struct FaultyWatch<R> {
    call: Call,
    lines: Lines<R>,
    shared: std::sync::Arc<ProxyState>,
    rules: watch::Receiver<Rule>,
    /// The resource version of the last event.
    version: String,
    /// The fault that holds since the rule changed.
    fault: Option<Fault>,
    ended: bool,
}

/// Returns the body of the response to a watch.
pub(super) fn stream(
    call: Call,
    body: Incoming,
    shared: std::sync::Arc<ProxyState>,
    rules: watch::Receiver<Rule>,
) -> impl Stream<Item = Chunk> + Send {
    let lines = StreamReader::new(body.into_data_stream().map_err(io::Error::other)).lines();
    let version = call.version.clone();
    let watch = FaultyWatch { call, lines, shared, rules, version, fault: None, ended: false };
    stream::unfold(watch, |mut watch| async move { watch.next().await.map(|chunk| (chunk, watch)) })
}

impl<R: AsyncBufRead + Unpin> FaultyWatch<R> {
    async fn next(&mut self) -> Option<Chunk> {
        loop {
            if self.ended {
                return None;
            }
            match self.fault {
                // The client gives the connection up.
                Some(Fault::Silence) => std::future::pending().await,
                Some(Fault::Disconnect) => return self.end(Err(cut())),
                Some(Fault::Gone) => return self.end(Ok(Fault::Gone.last_event().unwrap_or_default())),
                _ => {}
            }
            tokio::select! {
                // A rule holds for all events after it.
                biased;
                changed = self.rules.changed() => {
                    changed.ok()?;
                    self.fault = self.shared.decide(&self.call);
                }
                line = timeout(BOOKMARK_INTERVAL, self.lines.next_line()) => match line {
                    Err(_elapsed) => return Some(Ok(Frame::data(self.bookmark()))),
                    Ok(Ok(Some(line))) => if let Some(chunk) = self.event(line) { return Some(chunk) },
                    Ok(Ok(None)) => return None,
                    Ok(Err(error)) => return self.end(Err(error)),
                },
            }
        }
    }

    /// Returns what the client receives of an event: nothing if the watch has a fault before it.
    fn event(&mut self, line: String) -> Option<Chunk> {
        // A fault since the rule changed comes first, and is logged already.
        self.fault = self.fault.take().or_else(|| self.shared.decide(&self.call));
        let chunk = match self.fault {
            Some(Fault::Silence | Fault::Disconnect | Fault::Gone) => return None,
            Some(Fault::HalfBody) => {
                // The rest of the event, and the end of the body, are missing.
                self.fault = Some(Fault::Disconnect);
                return Some(Ok(Frame::data(Bytes::from(line[..line.len() / 2].to_owned()))));
            }
            Some(Fault::RepeatedEvent) => format!("{line}\n{line}\n"),
            _ => format!("{line}\n"),
        };
        self.fault = None;
        if let Some((name, version)) = named(&line) {
            self.version.clone_from(&version);
            self.shared.log(&Call { verb: "event", name, version, ..self.call.clone() }, None);
        }
        Some(Ok(Frame::data(Bytes::from(chunk))))
    }

    fn bookmark(&self) -> Bytes {
        let object =
            json!({"kind": "Bookmark", "apiVersion": "v1", "metadata": {"resourceVersion": self.version}});
        Bytes::from(format!("{}\n", json!({"type": "BOOKMARK", "object": object})))
    }

    fn end(&mut self, last: io::Result<Bytes>) -> Option<Chunk> {
        self.ended = true;
        Some(last.map(Frame::data))
    }
}

/// Returns the name and the resource version of the object of an event.
fn named(line: &str) -> Option<(String, String)> {
    let event: Value = serde_json::from_str(line).ok()?;
    let text = |key: &str| event["object"]["metadata"][key].as_str().map(str::to_owned);
    Some((text("name").unwrap_or_default(), text("resourceVersion")?))
}
