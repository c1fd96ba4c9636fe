//! The client `dbg`.

mod args;
mod bundle;
mod condition;
mod connect;
mod escape;
mod kubectl;
mod logs;
mod redact;

use std::io;
use std::process::ExitCode;

pub use args::{DbgArgs, DbgCommand};

/// The exit code if the service could not be reached or refused the request, or a file could not be written. clap uses 2.
const FAILED: u8 = 3;

/// Runs one command. Errors are one line on standard error.
pub async fn dbg(args: DbgArgs) -> ExitCode {
    let DbgArgs { socket, command } = args;
    let ended = match command {
        DbgCommand::Logs(args) => logs::run(&socket, args).await,
        DbgCommand::Condition(args) => condition::run(&socket, args).await,
        DbgCommand::Kubectl(args) => kubectl::run(&socket, args).await,
        DbgCommand::Bundle(args) => bundle::run(&socket, args).await,
    };
    match ended {
        Ok(code) => code,
        // The reader, such as head, has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dbg: {}", escape::escape(format!("{error:#}").as_bytes()));
            ExitCode::from(FAILED)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
