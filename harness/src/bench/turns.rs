//! Contenders that are compared.

use std::ops::RangeInclusive;

use anyhow::Result;
use kube::Client;
use testvm::progress::Step;

use super::batch::Batch;
use super::cluster::{CLASS, DRIVER_USER};
use super::measurement::Samples;
use super::peer;

/// A program that provisions the volumes of claims.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Contender {
    /// The beginning of the names of its rows.
    pub(super) prefix: &'static str,
    class: &'static str,
    /// Its user name at the API server.
    pub(super) user: &'static str,
}

pub(super) const OURS: Contender = Contender { prefix: "", class: CLASS, user: DRIVER_USER };
pub(super) const PEER: Contender = Contender { prefix: "peer_", class: peer::CLASS, user: peer::USER };
/// The peer without its own rate limits.
pub(super) const UNTHROTTLED_PEER: Contender = Contender { prefix: "unthrottled_peer_", ..PEER };

impl Contender {
    /// Returns a batch of claims for a round, which the contender provisions on `node`.
    pub(super) fn batch(&self, client: &Client, node: &str, name: &str, round: u64, claims: u64) -> Batch {
        let name = format!("{}{name}-{round}", self.prefix.replace('_', "-"));
        Batch::new(client, &name, self.class, node, claims)
    }

    /// Adds values to its rows, by the name, the unit and the value of each.
    pub(super) fn add(&self, samples: &mut Samples, n: u64, values: &[(&str, &'static str, f64)]) {
        for (name, unit, value) in values {
            samples.add(format!("{}{name}", self.prefix), n, unit, *value);
        }
    }
}

/// Measures the contenders in turns, so that other load on the machine affects all alike. Only one of them is measured at a time.
pub(super) async fn take_turns<C: Copy>(
    rounds: RangeInclusive<u64>,
    contenders: &[(&str, C)],
    step: &Step,
    mut measure: impl AsyncFnMut(C, u64) -> Result<()>,
) -> Result<()> {
    let last = *rounds.end();
    for round in rounds {
        for (name, contender) in contenders {
            step.note(format!("round {round} of {last}: {name}"));
            measure(*contender, round).await?;
        }
    }
    Ok(())
}
