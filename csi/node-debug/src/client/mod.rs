//! The client `dbg`.

mod args;
mod bundle;
mod condition;
mod connect;
mod escape;
mod exit_code;
mod kubectl;
mod logs;
mod redact;
mod secret_value;

use std::io;
use std::process::ExitCode;

pub use args::{DbgArgs, DbgCommand};

/// Runs one command. Errors are one line on standard error.
pub async fn dbg(args: DbgArgs) -> ExitCode {
    let DbgArgs { connection, command } = args;
    let ended = match command {
        DbgCommand::Logs(args) => logs::run(&connection, args).await,
        DbgCommand::Condition(args) => condition::run(&connection, args).await,
        DbgCommand::Kubectl(args) => kubectl::run(&connection, args).await,
        DbgCommand::Bundle(args) => bundle::run(&connection, args).await,
    };
    match ended {
        Ok(code) => code,
        // The reader, such as head, has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dbg: {}", escape::escape(format!("{error:#}").as_bytes()));
            ExitCode::from(exit_code::FAILED)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
