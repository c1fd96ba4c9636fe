//! The guest's side of the report port.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use super::report::Message;

/// Sends messages to the host, from any thread. It sends nothing after the verdict.
#[derive(Clone, Debug)]
pub(super) struct Reporter(Arc<Mutex<Option<File>>>);

impl Reporter {
    pub(super) fn new(port: File) -> Reporter {
        Reporter(Arc::new(Mutex::new(Some(port))))
    }

    pub(super) fn send(&self, message: &Message) {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = port.as_mut() {
            write(file, message);
        }
    }

    pub(super) fn log(&self, source: &str, line: &str) {
        self.send(&Message::Log { source: source.to_owned(), line: line.to_owned() });
    }

    /// Sends the verdict, unless one was sent before. The write returns when the host has received it.
    pub(super) fn verdict(&self, verdict: Result<(), String>) {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut file) = port.take() {
            write(&mut file, &Message::Verdict(verdict));
        }
    }
}

fn write(port: &mut File, message: &Message) {
    let written = serde_json::to_vec(message).map_err(std::io::Error::from).and_then(|mut line| {
        line.push(b'\n');
        port.write_all(&line)
    });
    if let Err(error) = written {
        // Only the console is left for this error. The host notices the missing verdict.
        eprintln!("guest-init: report {message:?}: {error}");
    }
}
