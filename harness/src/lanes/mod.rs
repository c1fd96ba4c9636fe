//! Test lanes.

use anyhow::Result;

use crate::report::Report;
use crate::session::Session;

#[derive(Debug, clap::Args)]
pub struct Args {}

pub async fn run(_session: &Session, _args: Args) -> Result<Report> {
    anyhow::bail!("being built")
}
