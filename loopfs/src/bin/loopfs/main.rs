//! `loopfs`: loop devices, project quotas and volumes from the command line. What it can do is what the library can.

mod devices;
mod output;
mod project;
mod quota;
mod size;
mod store;
mod trees;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use output::Answer;

const AFTER_HELP: &str = "\
Sizes are bytes, or a number with KiB, MiB, GiB, TiB, PiB or EiB (powers of 1024): 4096, 4MiB.

Exit codes:
  0  done
  1  it failed, and standard error says why; or the answer is not the one hoped for: `detach` found the device in use,
     `quota audit` found what is not in the project, `quota tag` left something out
  2  the command line was not understood

With --json, standard output is one JSON document: sizes in bytes, times in seconds since 1970, null for none. The
names of fields stay; new ones may be added. Errors are text on standard error.

All of it needs root (CAP_SYS_ADMIN); project quotas need XFS mounted with prjquota, and Linux 5.14.

Examples:
  loopfs attach disk.img                        # prints /dev/loop65536
  loopfs list
  loopfs detach disk.img --wait 10
  loopfs quota set /srv/data/alice --id 7 --bytes 4MiB --inodes 1000
  loopfs quota tag /srv/data/alice --id 7       # the limits above now hold for what is there, and for what comes
  loopfs quota show /srv/data/alice
  loopfs quota audit /srv/data/alice || echo 'somebody changed ids'
  loopfs --json store list /var/lib/loopfs/data";

/// Loop devices, XFS project quotas and volume stores
#[derive(Debug, Parser)]
#[command(name = "loopfs", version, after_help = AFTER_HELP, max_term_width = 110)]
struct Args {
    /// Answer with JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Device(devices::DeviceCommand),
    /// Limits on the bytes and inodes of directory trees
    #[command(subcommand)]
    Quota(quota::QuotaCommand),
    /// Volumes of a store; changes nothing
    #[command(subcommand)]
    Store(store::StoreCommand),
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args.command) {
        Ok(answer) => {
            let printed = std::io::stdout().lock().write_all(answer.print(args.json).as_bytes());
            match printed {
                Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                    eprintln!("loopfs: write to standard output: {error}");
                    ExitCode::FAILURE
                }
                _ if answer.good => ExitCode::SUCCESS,
                _ => ExitCode::FAILURE,
            }
        }
        Err(error) => match error.downcast::<clap::Error>() {
            // A command found arguments that contradict each other. This adds the usage line.
            Ok(usage) => usage.format(&mut Args::command()).exit(),
            Err(error) => {
                eprintln!("loopfs: {}", output::printable(&format!("{error:#}")));
                ExitCode::FAILURE
            }
        },
    }
}

fn run(command: &Command) -> anyhow::Result<Answer> {
    match command {
        Command::Device(command) => command.run(),
        Command::Quota(command) => command.run(),
        Command::Store(command) => command.run(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
