//! Logs to stderr.

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::args::ProvisionerLogFormat;

/// Starts logging.
///
/// # Errors
/// When the level is invalid, or logging was started already.
pub(crate) fn init(level: &str, format: ProvisionerLogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level).with_context(|| format!("--log-level {level:?}"))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        ProvisionerLogFormat::Text => subscriber.with_ansi(false).try_init(),
        ProvisionerLogFormat::Json => subscriber.json().try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("start logging: {error}"))
}
