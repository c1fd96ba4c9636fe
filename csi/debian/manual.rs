//! Writes the man page of `loopfs-csi` into a directory: `cargo run --package csi --example loopfs-csi-manual -- DIRECTORY`.

use std::path::PathBuf;

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

/// Administrators run the program as root.
const SECTION: &str = "8";

fn main() -> anyhow::Result<()> {
    let directory =
        std::env::args_os().nth(1).context("no directory for the man page: add one as argument")?;
    let directory = PathBuf::from(directory);
    let page = Man::new(csi::Args::command()).section(SECTION);
    page.generate_to(&directory).with_context(|| format!("write the man page to {}", directory.display()))?;
    Ok(())
}
