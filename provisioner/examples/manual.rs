//! Writes the man pages of `loopfs-provisioner` and of its roles into a directory: `cargo run --package provisioner --example
//! loopfs-provisioner-manual -- DIRECTORY`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

/// Administrators run the program as root.
const SECTION: &str = "8";

fn main() -> anyhow::Result<()> {
    let directory =
        std::env::args_os().nth(1).context("no directory for the man page: add one as argument")?;
    let directory = PathBuf::from(directory);
    // Each role has `--help`, and a page about the command `help` would repeat it.
    let mut command = provisioner::Args::command().disable_help_subcommand(true);
    command.build();
    for role in command.get_subcommands() {
        write_page(role.clone(), &directory)?;
    }
    write_page(command, &directory)
}

fn write_page(command: clap::Command, directory: &Path) -> anyhow::Result<()> {
    let page = Man::new(command).section(SECTION);
    let file = directory.join(page.get_filename());
    page.generate_to(directory).map(drop).with_context(|| format!("write {}", file.display()))
}
