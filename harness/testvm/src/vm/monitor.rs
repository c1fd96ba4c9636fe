//! QEMU's monitor (QMP), which reports if the host cannot read or write the image of a disk.
//!
//! If the host's disk is full, QEMU stops the guest, and a guest that is stopped says nothing. The machine ends with the
//! host's error, because a deadline would pass without a cause, and an I/O error in the guest would look like a fault of
//! what is tested.

use anyhow::{Context, Result};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;

use super::spec::Disk;
use crate::disk_space;

/// The command without which QEMU sends no events.
const START: &[u8] = b"{\"execute\": \"qmp_capabilities\"}\n";

/// Sends commands to QEMU.
#[derive(Debug)]
pub(super) struct Monitor {
    writer: OwnedWriteHalf,
    /// The number of commands that QEMU has answered.
    answered: watch::Receiver<usize>,
}

/// The messages of QEMU.
pub(super) struct Messages {
    reader: OwnedReadHalf,
    answered: watch::Sender<usize>,
}

/// Returns the two directions of the monitor, after it has requested events.
pub(super) async fn open(stream: UnixStream) -> Result<(Monitor, Messages)> {
    let (reader, mut writer) = stream.into_split();
    writer.write_all(START).await.context("write to QEMU's monitor")?;
    let (sender, answered) = watch::channel(0);
    Ok((Monitor { writer, answered }, Messages { reader, answered: sender }))
}

impl Monitor {
    /// Executes a command, which is a line of JSON, and waits until QEMU has answered.
    pub(super) async fn execute(&mut self, command: &[u8]) -> Result<()> {
        // The answer to START is the first.
        self.answered.wait_for(|answered| *answered > 0).await.context("QEMU has ended")?;
        let before = *self.answered.borrow_and_update();
        self.writer.write_all(command).await.context("write to QEMU's monitor")?;
        self.answered.wait_for(|answered| *answered > before).await.context("QEMU has ended")?;
        Ok(())
    }
}

/// Reads the messages until the host fails to read or write the image of a disk, and returns a message about it. It never
/// returns otherwise.
pub(super) async fn disk_error(messages: Messages, disks: Vec<Disk>) -> String {
    let mut lines = BufReader::new(messages.reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if is_answer(&line) {
            messages.answered.send_modify(|answered| *answered += 1);
        }
        if let Some(message) = message(&line, &disks) {
            return message;
        }
    }
    // QEMU has ended, which the report port shows, too.
    drop(messages.answered);
    std::future::pending().await
}

/// Returns `true` for the answer to a command, whether it succeeded or not.
fn is_answer(line: &str) -> bool {
    let answer: Option<serde_json::Map<String, serde_json::Value>> = serde_json::from_str(line).ok();
    answer.is_some_and(|answer| answer.contains_key("return") || answer.contains_key("error"))
}

/// An event of QEMU. Other messages have other fields.
#[derive(Deserialize)]
struct Event {
    event: String,
    data: BlockIoError,
}

/// The event BLOCK_IO_ERROR.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct BlockIoError {
    /// The name of a drive; empty for a node.
    device: String,
    node_name: Option<String>,
    operation: String,
    reason: String,
}

/// Returns the message about a line of the monitor, or `None` if it is about no disk.
fn message(line: &str, disks: &[Disk]) -> Option<String> {
    let Event { event, data } = serde_json::from_str(line).ok()?;
    if event != "BLOCK_IO_ERROR" {
        return None;
    }
    let is_named = |name: &str| data.device == name || data.node_name.as_deref() == Some(name);
    let disk = disks.iter().enumerate().find(|(index, _)| is_named(&device_name(*index)));
    let (name, directory) = match disk {
        Some((_, disk)) => (disk.name.as_str(), disk.written_directory()),
        None => (data.device.as_str(), None),
    };
    let place = directory.map_or_else(String::new, |directory| {
        let free = disk_space::free_mib(&directory).map_or_else(|_| "?".to_owned(), |free| free.to_string());
        format!(" in {} ({free} MiB free)", directory.display())
    });
    Some(format!(
        "{} the image of the disk {name}{place}: the host returned {}; check the disk of this host, and free space on it",
        data.operation, data.reason
    ))
}

/// Returns QEMU's name of the disk with this index.
pub(super) fn device_name(index: usize) -> String {
    format!("disk{index}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::DiskMode;

    fn disks() -> Vec<Disk> {
        let disk =
            |name: &str, mode| Disk { name: name.into(), image: format!("/{name}/image").into(), mode };
        vec![
            disk("root", DiskMode::Scratch),
            disk("data", DiskMode::Persistent),
            disk("cut", DiskMode::Logged),
        ]
    }

    #[test]
    fn host_error_has_disk_and_cause() {
        // Captured from QEMU 10.0.
        let line = r##"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "BLOCK_IO_ERROR", "data": {"device": "disk1", "node-name": "#block345", "nospace": true, "reason": "No space left on device", "operation": "write", "action": "stop"}}"##;
        let text = message(line, &disks()).unwrap();
        assert!(text.starts_with("write the image of the disk data in /data "), "{text}");
        assert!(text.contains("No space left on device"), "{text}");
        let of_node = line.replace("disk1", "").replace("#block345", "disk2");
        assert!(message(&of_node, &disks()).unwrap().contains("the disk cut"));
    }

    #[test]
    fn result_or_error_is_an_answer() {
        assert!(is_answer(r#"{"return": {}}"#));
        assert!(is_answer(r#"{"error": {"class": "GenericError", "desc": "there is no console"}}"#));
        for line in [r#"{"QMP": {"capabilities": []}}"#, r#"{"event": "RESUME", "timestamp": {}}"#, "[]", ""]
        {
            assert!(!is_answer(line), "{line}");
        }
    }
}
