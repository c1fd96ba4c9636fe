//! The messages of a guest to its host: one JSON object per line on the report port, the verdict last.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The name of the virtio port that carries reports.
pub const REPORT_PORT: &str = "testvm.report";

/// The last line of the guest in the kernel's log. The host looks for it on the console: without it, messages about faults of
/// the kernel may not have reached the console either.
pub const END_OF_CONSOLE: &str = "guest-init: the end of the log";

/// A message of the guest.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// PID 1 runs and has read its specification.
    Started {
        kernel: String,
    },
    /// A line of output of a service, a command or a test binary.
    Log {
        source: String,
        line: String,
    },
    TestBinary(TestBinaryResult),
    /// All steps of a node are complete.
    NodeReady,
    /// A service ended. `restarted` is `true` if it was restarted.
    ServiceEnded {
        name: String,
        how: String,
        restarted: bool,
    },
    /// The last message: the result of the whole boot. The guest sends exactly one; a guest that ends without one has failed.
    Verdict(Result<(), String>),
}

/// How one test binary ended. [`Message::Log`] lines with its name precede it and have its output.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct TestBinaryResult {
    pub name: String,
    pub end: End,
    pub time: Duration,
}

/// How a program ended.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    Exited(i32),
    Signalled(String),
    TimedOut,
    NotStarted(String),
}
