//! What every call has in common: a log line that names it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tonic::{Code, Response, Status};
use tracing::Instrument;

use crate::error::Result;

/// Numbers calls in the log, so that the lines of one can be told from those of another.
static CALLS: AtomicU64 = AtomicU64::new(1);

/// Volume ids come from outside: bounded, and with control characters escaped.
const MAX_LOGGED_CHARS: usize = 128;

/// Whether a call that went well is worth a line by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RpcKind {
    /// It changes something.
    Mutating,
    /// It is asked over and over.
    ReadOnly,
}

/// Runs one call, logs its outcome, and turns its error into a status.
pub(crate) async fn traced<T>(
    rpc: &'static str,
    kind: RpcKind,
    volume: &str,
    call: impl Future<Output = Result<T>>,
) -> Result<Response<T>, Status> {
    // Of the level that is never left out: a line about a call always says which.
    let span = tracing::error_span!(
        "rpc",
        rpc,
        request = CALLS.fetch_add(1, Ordering::Relaxed),
        volume = volume_field(volume),
    );
    async {
        let start = Instant::now();
        let outcome = call.await;
        let took = format_args!("{:.1?}", start.elapsed());
        match &outcome {
            Ok(_) if kind == RpcKind::Mutating => tracing::info!(%took, "done"),
            Ok(_) => tracing::debug!(%took, "done"),
            // The fault of this program or of the machine, not of the caller.
            Err(error) if error.code() == Code::Internal => tracing::error!(%took, %error, "failed"),
            Err(error) => tracing::warn!(%took, code = ?error.code(), %error, "refused"),
        }
        outcome.map(Response::new).map_err(Status::from)
    }
    .instrument(span)
    .await
}

fn volume_field(volume: &str) -> Option<tracing::field::DebugValue<Escaped<'_>>> {
    (!volume.is_empty()).then(|| tracing::field::debug(Escaped(volume)))
}

struct Escaped<'a>(&'a str);

impl fmt::Debug for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        text.chars()
            .take(MAX_LOGGED_CHARS)
            .try_for_each(|character| write!(f, "{}", character.escape_debug()))?;
        f.write_str(if text.chars().nth(MAX_LOGGED_CHARS).is_some() { "…" } else { "" })
    }
}

/// The wire has signed numbers.
pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_id_cannot_forge_or_flood_the_log() {
        assert_eq!(format!("{:?}", Escaped("pvc-1")), "pvc-1");
        assert_eq!(format!("{:?}", Escaped("a\nERROR")), "a\\nERROR");
        assert_eq!(format!("{:?}", Escaped(&"v".repeat(4096))).chars().count(), MAX_LOGGED_CHARS + 1);
    }
}
