//! The logs of the node's components, in one ring buffer for each.

mod file;
mod kmsg;
mod level;
mod line;
mod ring;
mod source;
mod stream;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) use line::Line;
#[cfg(test)]
pub(crate) use line::RawLine;
pub(crate) use ring::{Position, Ring, Selection};
pub use source::{LineSource, LogSource};
pub(crate) use stream::listen;
use tokio::task::JoinSet;

/// The wait after a source has failed, before it is opened again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A component whose lines are kept.
#[derive(Debug)]
pub(crate) struct LoggedComponent {
    pub(crate) name: String,
    pub(crate) source: LineSource,
    pub(crate) ring: Arc<Ring>,
    problem: Mutex<Option<String>>,
}

/// All components, in the order of the command line.
#[derive(Clone, Debug)]
pub(crate) struct Logs(Arc<[Arc<LoggedComponent>]>);

impl Logs {
    /// Prepares a ring of `max_bytes` for each source.
    pub(crate) fn new(sources: Vec<LogSource>, max_bytes: usize) -> Self {
        let component = |LogSource { name, source }| {
            let ring = Arc::new(Ring::new(max_bytes));
            Arc::new(LoggedComponent { name, source, ring, problem: Mutex::default() })
        };
        Self(sources.into_iter().map(component).collect())
    }

    pub(crate) fn components(&self) -> impl Iterator<Item = &Arc<LoggedComponent>> {
        self.0.iter()
    }

    pub(crate) fn component(&self, name: &str) -> Option<&Arc<LoggedComponent>> {
        self.components().find(|component| component.name == name)
    }

    /// Reads all sources until the returned tasks are dropped.
    pub(crate) fn follow(&self) -> JoinSet<()> {
        self.components().map(|component| Arc::clone(component).follow()).collect()
    }
}

impl LoggedComponent {
    /// Returns the reason why no lines arrive, or `None`.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }

    /// Reads the source, and again after each failure. A source that fails never stops the others.
    async fn follow(self: Arc<Self>) {
        let mut tail = None;
        loop {
            let ended = match &self.source {
                LineSource::File(path) => {
                    file::follow(path, &self.ring, &mut tail, |problem| self.set_problem(problem)).await
                }
                LineSource::Fifo(path) => {
                    self.set_problem(None);
                    stream::follow_fifo(path, &self.ring).await
                }
                LineSource::Unix(path) => {
                    self.set_problem(None);
                    stream::follow_socket(path, Arc::clone(&self.ring)).await
                }
                LineSource::Kmsg => {
                    self.set_problem(None);
                    kmsg::follow(&self.ring).await
                }
            };
            let problem = match ended {
                Ok(()) => "the source ended".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            if self.problem().as_ref() != Some(&problem) {
                tracing::warn!(
                    component = self.name, source = %self.source, problem,
                    "could not read a log; retrying every {RETRY_INTERVAL:?}"
                );
            }
            self.set_problem(Some(problem));
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests;
