//! `dbg condition`.

use std::io::{self, Write, stdout};
use std::process::ExitCode;
use std::time::Duration;

use super::args::{ConditionArgs, ConditionCommand, ConnectionArgs};
use super::connect::Client;
use super::escape::escape;
use super::exit_code::NOT_MET;
use crate::proto as wire;

pub(super) async fn run(connection: &ConnectionArgs, args: ConditionArgs) -> anyhow::Result<ExitCode> {
    let mut client = Client::connect(connection).await?;
    let response = match args.command {
        ConditionCommand::List => return list(&mut client).await,
        ConditionCommand::Get { name, arguments } => {
            client.service.condition(wire::ConditionRequest { name, arguments }).await
        }
        ConditionCommand::Wait { name, arguments, timeout } => {
            let timeout = Duration::try_from(timeout)?;
            let timeout_ms = u64::try_from(timeout.as_millis())?;
            client.service.wait_condition(wire::WaitConditionRequest { name, arguments, timeout_ms }).await
        }
    };
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
    let described = client.service.describe(wire::DescribeRequest {}).await;
    let described = described.map_err(|status| client.explain(status))?.into_inner();
    let mut out = stdout().lock();
    for condition in described.conditions {
        let name = [condition.name, condition.argument].join(" ");
        writeln!(
            out,
            "{:<24} {}",
            escape(name.trim_end().as_bytes()),
            escape(condition.description.as_bytes())
        )?;
    }
    Ok(ExitCode::SUCCESS)
}
