//! Runs blocking work outside the event loop.

use tracing::Span;

use crate::error::Result;

/// Runs work that blocks in system calls. The work continues if the client disconnects.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let span = Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work)).await?
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[tokio::test]
    async fn panicking_work_is_internal_error() {
        let outcome = run(|| -> Result<()> { panic!("on purpose") }).await;
        assert_eq!(outcome.unwrap_err().code(), Code::Internal);
    }
}
