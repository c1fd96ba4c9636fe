//! The options of both programs, as README.md lists them.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory};

/// Returns the long options of a command and of its subcommands.
fn options(command: &Command) -> BTreeSet<String> {
    let own =
        command.get_arguments().filter_map(|argument| argument.get_long()).map(|long| format!("--{long}"));
    let own: BTreeSet<String> =
        own.filter(|long| !["--help", "--version"].contains(&long.as_str())).collect();
    command.get_subcommands().map(options).fold(own, |all, more| all.union(&more).cloned().collect())
}

/// Returns the options in the first cells of the table below a heading.
fn documented(heading: &str) -> BTreeSet<String> {
    let readme = include_str!("../../README.md");
    let section = readme.split("\n## ").find(|section| section.starts_with(heading)).unwrap();
    let cells = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `--"))
        .map(|row| row.split('|').next().unwrap());
    cells
        .flat_map(|cell| cell.split(',').map(|name| name.trim().trim_matches(['`', '-'])))
        .map(|name| format!("--{name}"))
        .collect()
}

#[test]
fn readme_lists_every_service_option() {
    assert_eq!(documented("Options of node-debug"), options(&node_debug::Args::command()));
}

#[test]
fn readme_lists_every_client_option() {
    assert_eq!(documented("Options of dbg"), options(&node_debug::DbgArgs::command()));
}
