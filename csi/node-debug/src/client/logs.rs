//! `dbg logs`.

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use anyhow::ensure;

use super::args::LogsArgs;
use super::connect::Client;
use super::escape::{escape, escape_lines};
use crate::proto as wire;

/// A longer line is printed as several.
const MAX_LINE_BYTES: usize = 1 << 20;

pub(super) async fn run(socket: &Path, args: LogsArgs) -> anyhow::Result<ExitCode> {
    let mut client = Client::connect(socket).await?;
    let LogsArgs { component, follow, lines } = args;
    let Some(component) = component else { return list(&mut client).await };
    let parts = client.service.logs(wire::LogsRequest { component, lines, follow }).await;
    let mut parts = parts.map_err(|status| client.explain(status))?.into_inner();
    let mut unfinished = Vec::new();
    while let Some(part) = parts.message().await.map_err(|status| client.explain(status))? {
        unfinished.extend(part.content);
        let end = match unfinished.iter().rposition(|byte| *byte == b'\n') {
            None if unfinished.len() > MAX_LINE_BYTES => unfinished.len(),
            newline => newline.map_or(0, |newline| newline + 1),
        };
        print(&unfinished[..end])?;
        unfinished.drain(..end);
    }
    print(&unfinished)?;
    ensure!(!follow, "node-debug stopped; start it again to follow the log");
    Ok(ExitCode::SUCCESS)
}

fn print(lines: &[u8]) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    out.write_all(escape_lines(lines).as_bytes())?;
    Ok(out.flush()?)
}

async fn list(client: &mut Client) -> anyhow::Result<ExitCode> {
    let described = client.describe().await?;
    let mut out = stdout().lock();
    for component in described.components {
        let line = format!("{:<16} {}", component.name, component.source);
        writeln!(out, "{}", escape(line.as_bytes()))?;
    }
    Ok(ExitCode::SUCCESS)
}
