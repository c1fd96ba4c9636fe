//! The parts of `bench node`.

use anyhow::Result;
use testvm::session::Session;

use super::super::outcome::{Args, Outcome};
use super::losetup;

pub(in crate::bench) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let part = losetup::run(session, args).await?;
    Ok(Outcome::new(vec![part], losetup::thresholds, &[losetup::PLOT]))
}
