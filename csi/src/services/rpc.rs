//! The parts that all RPCs share: a log line that identifies the call, and conversions.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tonic::{Code, Response, Status};
use tracing::Instrument;

use crate::error::Result;

/// The number of the next call. The log contains it, so that the lines of concurrent calls can be told apart.
static CALLS: AtomicU64 = AtomicU64::new(1);

/// The maximum length of a volume id in the log. Clients choose the ids, so control characters are escaped too.
const MAX_LOGGED_CHARS: usize = 128;

/// Decides at which level the success of a call is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RpcKind {
    /// The RPC changes state. Its success is logged by default.
    Mutating,
    /// The RPC changes nothing, and orchestrators call it repeatedly.
    ReadOnly,
}

/// Runs one call, logs its result, and converts its error to a status.
pub(crate) async fn traced<T>(
    rpc: &'static str,
    kind: RpcKind,
    volume: &str,
    call: impl Future<Output = Result<T>>,
) -> Result<Response<T>, Status> {
    // Spans of this level are always enabled, so each line about a call identifies the call.
    let span = tracing::error_span!(
        "rpc",
        rpc,
        request = CALLS.fetch_add(1, Ordering::Relaxed),
        volume = volume_field(volume),
    );
    async {
        let start = Instant::now();
        let result = call.await;
        let took = format_args!("{:.1?}", start.elapsed());
        match &result {
            Ok(_) if kind == RpcKind::Mutating => tracing::info!(%took, "the call succeeded"),
            Ok(_) => tracing::debug!(%took, "the call succeeded"),
            // The driver or the machine caused the error, not the client.
            Err(error) if error.code() == Code::Internal => tracing::error!(%took, %error, "the call failed"),
            Err(error) => tracing::warn!(%took, code = ?error.code(), %error, "the call was refused"),
        }
        result.map(Response::new).map_err(Status::from)
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

/// Converts to the signed integers of the CSI messages.
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
