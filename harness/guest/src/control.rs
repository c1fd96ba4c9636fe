//! The requests to a running node: one JSON object per line in each direction on the control port.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The name of the virtio port that carries requests and responses.
pub const CONTROL_PORT: &str = "testvm.control";

/// A request of the host.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Request {
    /// The response repeats the id: requests run concurrently, and each response is sent when its request is
    /// done.
    pub id: u64,
    /// What the guest has to do.
    pub action: Action,
}

/// The actions that a host can request.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Run a program in the node's root file system, as root.
    Exec { argv: Vec<String>, input: String, timeout: Duration },
    /// Send a signal to a service, by the name it has in the specification.
    SignalService { name: String, signal: i32 },
    /// Stop the services, send the verdict, unmount, power off.
    PowerOff,
}

/// The response to one request.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Response {
    pub id: u64,
    /// The output of [`Action::Exec`], or the text of the error.
    pub result: Result<Option<ExecOutput>, String>,
}

/// The result of a program that [`Action::Exec`] ran.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ExecOutput {
    /// The exit code, or 128 plus the number of the signal that ended it.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}
