//! `dbg logs`.

use std::io::{Write, stdout};
use std::process::ExitCode;

use anyhow::ensure;
use jiff::Timestamp;

use super::args::{ConnectionArgs, LogsArgs};
use super::connect::Client;
use super::escape::escape;
use crate::proto as wire;

pub(super) async fn run(connection: &ConnectionArgs, args: LogsArgs) -> anyhow::Result<ExitCode> {
    let mut client = Client::connect(connection).await?;
    let LogsArgs { component, follow, since, level, lines, timestamps } = args;
    let Some(component) = component else { return list(&mut client).await };
    let since = since.map(|age| Timestamp::now().checked_sub(age)).transpose()?;
    let request = wire::LogsRequest {
        component,
        lines,
        follow,
        since_unix_ms: since.map(Timestamp::as_millisecond),
        minimum_level: level.map_or(wire::Level::Unspecified, wire::Level::from).into(),
    };
    let batches = client.service.logs(request).await;
    let mut batches = batches.map_err(|status| client.explain(status))?.into_inner();
    while let Some(batch) = batches.message().await.map_err(|status| client.explain(status))? {
        let mut out = stdout().lock();
        for line in &batch.lines {
            writeln!(out, "{}", printable(line, timestamps))?;
        }
        out.flush()?;
    }
    ensure!(!follow, "node-debug stopped; start it again to follow the log");
    Ok(ExitCode::SUCCESS)
}

/// Returns the line as it is printed, without control characters.
fn printable(line: &wire::LogLine, timestamps: bool) -> String {
    let mut text = escape(&line.text);
    if let Some(note) = note(line) {
        text.push_str(&note);
    }
    if timestamps { format!("{} {text}", prefix(line)) } else { text }
}

/// Returns the time and the level of a line.
pub(super) fn prefix(line: &wire::LogLine) -> String {
    let time = Timestamp::from_millisecond(line.unix_ms).unwrap_or(Timestamp::UNIX_EPOCH);
    let level = match line.level() {
        wire::Level::Unspecified => "-",
        wire::Level::Trace => "TRACE",
        wire::Level::Debug => "DEBUG",
        wire::Level::Info => "INFO",
        wire::Level::Warn => "WARN",
        wire::Level::Error => "ERROR",
    };
    format!("{time:.3} {level:<5}")
}

/// Returns what is missing from a line, or before it.
pub(super) fn note(line: &wire::LogLine) -> Option<String> {
    if line.dropped_lines > 0 {
        return Some(format!(
            "[dbg: {} lines were dropped here before they could be read]",
            line.dropped_lines
        ));
    }
    (line.cut_bytes > 0).then(|| format!(" [dbg: {} more bytes of this line were not kept]", line.cut_bytes))
}

async fn list(client: &mut Client) -> anyhow::Result<ExitCode> {
    let described = client.service.describe(wire::DescribeRequest {}).await;
    let described = described.map_err(|status| client.explain(status))?.into_inner();
    let mut out = stdout().lock();
    for component in described.components {
        let problem =
            if component.problem.is_empty() { String::new() } else { format!(": {}", component.problem) };
        let line = format!(
            "{:<16} {} lines, {} bytes, {} dropped, from {}{problem}",
            component.name, component.lines, component.bytes, component.dropped_lines, component.source
        );
        writeln!(out, "{}", escape(line.as_bytes()))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text also reports cut bytes and dropped lines.
    #[test]
    fn printed_lines_escape_control_characters() {
        let line = wire::LogLine { text: b"\x1b[2Jx".to_vec(), cut_bytes: 7, ..Default::default() };
        assert_eq!(printable(&line, false), "\\u{1b}[2Jx [dbg: 7 more bytes of this line were not kept]");
        let marker = wire::LogLine { dropped_lines: 3, unix_ms: 1000, ..Default::default() };
        assert_eq!(
            printable(&marker, true),
            "1970-01-01T00:00:01.000Z -     [dbg: 3 lines were dropped here before they could be read]"
        );
    }
}
