//! Collects the warnings that mdBook logs.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// A layer that keeps the text of each warning and error.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        // A level is less than another one if it is more severe.
        if *event.metadata().level() <= Level::WARN {
            let mut message = Message::default();
            event.record(&mut message);
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message.0);
        }
    }
}

/// The text of an event.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// Calls `work`, and returns its result and the warnings that this thread logged in the meantime.
pub(crate) fn collect<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let warnings = Warnings::default();
    let subscriber = tracing_subscriber::registry().with(warnings.clone());
    let result = tracing::subscriber::with_default(subscriber, work);
    let found = std::mem::take(&mut *warnings.0.lock().unwrap_or_else(PoisonError::into_inner));
    (result, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_warnings_and_errors_are_collected() {
        let (result, found) = collect(|| {
            tracing::info!("an information");
            tracing::warn!(page = "a.md", "a warning with {}", 1);
            tracing::error!("an error");
            7
        });
        assert_eq!((result, found), (7, vec!["a warning with 1".to_owned(), "an error".to_owned()]));
    }
}
