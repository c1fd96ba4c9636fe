//! `loopfs`: a command-line tool for loop devices, project quotas and volumes, and for the machine and the disk that they need.

mod data_dir;
mod data_disk;
mod devices;
mod doctor;
mod losetup;
mod manual;
mod node_identity;
mod output;
mod preflight;
mod project;
mod quota;
mod shell;
mod size;
mod store;
mod trees;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

const AFTER_HELP: &str = "\
Sizes are bytes, or a number with KiB, MiB, GiB, TiB, PiB or EiB (powers of 1024): 4096, 4MiB.

Exit codes:
  0  success
  1  the command failed, with the cause on standard error; or `detach` found the device in use, `quota check` found
     inodes outside the project, `quota tag` skipped entries, `data-dir check` found a problem, or `doctor` found that
     something is missing
  2  the command line is invalid

With --json, standard output is one JSON document: sizes in bytes, times in seconds since 1970, null for none. Field
names do not change; new fields may be added. Errors are text on standard error.

Commands that change or read devices, quotas or a store need root (CAP_SYS_ADMIN). Project quotas need XFS
mounted with prjquota, and Linux 5.14.

Examples:
  loopfs attach disk.img                        # prints /dev/loop65536
  loopfs list
  loopfs detach disk.img --wait 10
  loopfs quota set /srv/data/alice --id 7 --bytes 4MiB --inodes 1000
  loopfs quota tag /srv/data/alice --id 7       # applies the limits above to existing and new files
  loopfs quota show /srv/data/alice
  loopfs quota check /srv/data/alice || echo 'project ids were changed'
  loopfs --json store list /var/lib/loopfs/data
  loopfs doctor --data-dir /var/lib/loopfs/data --kubelet-dir /var/lib/kubelet
  loopfs data-dir format /dev/vdb --yes-format-this-disk      # prints the UUID
  loopfs data-dir mount UUID=1b466c45-bcaa-4ddd-a46c-e65ff913722d /var/lib/loopfs/data";

/// Loop devices, XFS project quotas and volume stores
#[derive(Debug, Parser)]
#[command(name = "loopfs", version, after_help = AFTER_HELP, max_term_width = 110)]
struct Args {
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: LoopfsCommand,
}

#[derive(Debug, Subcommand)]
enum LoopfsCommand {
    #[command(flatten)]
    Device(devices::DeviceCommand),
    /// Limit the bytes and inodes of directory trees
    #[command(subcommand)]
    Quota(quota::QuotaCommand),
    /// Show the volumes of a store, without changing it
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Check, mount and format the disk of the volumes
    #[command(subcommand)]
    DataDir(data_dir::DataDirCommand),
    NodeIdentity(node_identity::NodeIdentity),
    Doctor(doctor::Doctor),
    Manual(manual::Manual),
    /// Set up loop devices with the options and output of losetup(8)
    #[command(disable_help_flag = true)]
    Losetup {
        /// The arguments of losetup; `loopfs losetup --help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    // losetup has options of its own, also with names that `loopfs` has.
    let mut words = std::env::args_os();
    if words.next().is_some_and(|program| losetup::is_program_name(&program)) {
        return losetup::main(words);
    }
    if words.next().is_some_and(|command| command == losetup::NAME) {
        return losetup::main(words);
    }
    let args = Args::parse();
    let result = match &args.command {
        LoopfsCommand::Device(command) => command.run(),
        LoopfsCommand::Quota(command) => command.run(),
        LoopfsCommand::Store(command) => command.run(),
        LoopfsCommand::DataDir(command) => command.run(),
        LoopfsCommand::NodeIdentity(command) => command.run(),
        LoopfsCommand::Doctor(command) => command.run(),
        LoopfsCommand::Manual(command) => command.run(Args::command()),
        LoopfsCommand::Losetup { args } => return losetup::main(args.iter().cloned()),
    };
    match result {
        Ok(output) => {
            let printed = std::io::stdout().lock().write_all(output.print(args.json).as_bytes());
            match printed {
                Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                    eprintln!("loopfs: write to standard output: {error}");
                    ExitCode::FAILURE
                }
                _ if output.good => ExitCode::SUCCESS,
                _ => ExitCode::FAILURE,
            }
        }
        Err(error) => {
            eprintln!("loopfs: {}", output::printable(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_systemd_unit_mounts_by_uuid() {
        let unit = include_str!("../../examples/systemd/loopfs-data@.service");
        let has = |line: &str| unit.lines().any(|found| found == line);
        // A service of type oneshot has no time limit by default, and the kubelet waits for it.
        assert!(has("TimeoutStartSec=2min"), "{unit}");
        let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        assert!(command.contains(" mount UUID=%I "), "{command}");
        let args = Args::try_parse_from(command.split(' ')).unwrap();
        assert!(matches!(args.command, LoopfsCommand::DataDir(data_dir::DataDirCommand::Mount(_))));
    }
}
