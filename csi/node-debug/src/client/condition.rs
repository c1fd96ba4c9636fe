//! `dbg condition`.

use std::io::{self, Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use super::args::ConditionCommand;
use super::connect::Client;
use super::escape::escape;
use crate::proto as wire;

/// The exit code if a condition is not met.
const NOT_MET: u8 = 1;

pub(super) async fn run(socket: &Path, command: ConditionCommand) -> anyhow::Result<ExitCode> {
    let mut client = Client::connect(socket).await?;
    let (name, argument, wait) = match command {
        ConditionCommand::List => return list(&mut client).await,
        ConditionCommand::Get { name, argument } => (name, argument, None),
        ConditionCommand::Wait { name, argument, timeout } => (name, argument, Some(timeout)),
    };
    let wait_ms = wait.map(|wait| u64::try_from(wait.as_millis())).transpose()?;
    let request = wire::ConditionRequest { name, argument: argument.unwrap_or_default(), wait_ms };
    let response = client.service.condition(request).await;
    let wire::ConditionResponse { met, detail } =
        response.map_err(|status| client.explain(status))?.into_inner();
    let line = format!("{}: {}", if met { "met" } else { "not met" }, escape(detail.as_bytes()));
    match writeln!(stdout(), "{line}") {
        // The exit code has the result also if the reader has ended.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::from(NOT_MET) })
}

async fn list(client: &mut Client) -> anyhow::Result<ExitCode> {
    let described = client.describe().await?;
    let mut out = stdout().lock();
    for condition in described.conditions {
        let name = [condition.name, condition.argument].join(" ");
        let line = format!("{:<24} {}", name.trim_end(), condition.description);
        writeln!(out, "{}", escape(line.as_bytes()))?;
    }
    Ok(ExitCode::SUCCESS)
}
