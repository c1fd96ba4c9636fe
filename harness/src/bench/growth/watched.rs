//! A volume in a pod, and a program there that reports its expansion.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testvm_cluster::exec::ExecStream;

use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;

pub(super) const SIZE: Size = Size::mebibytes(1);
pub(super) const GROWN: Size = Size::mebibytes(4);
/// The timeout of an expansion. It includes an expansion that the kubelet has to complete, so that the
/// measurement shows it.
pub(super) const GROW_TIMEOUT: Duration = Duration::from_secs(300);
/// The timeout from the start of the program to its first line, on an emulated processor.
const START_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct Watched<'a> {
    env: &'a TestEnv<'a>,
    claim: &'a str,
    program: ExecStream,
}

impl<'a> Watched<'a> {
    /// Starts the program for the volume of a claim in a pod. On return, the program watches the volume.
    pub(super) async fn start(
        env: &'a TestEnv<'a>,
        pod: &str,
        claim: &'a str,
        volume: &str,
    ) -> Result<Watched<'a>> {
        let mut program =
            ExecStream::start(&env.pods(), pod, &["/volume-check", "watch-size", volume]).await?;
        let line = program.line(START_TIMEOUT).await?;
        expect(&line, SIZE).with_context(|| format!("volume {volume} before its expansion"))?;
        Ok(Watched { env, claim, program })
    }

    /// Requests the expansion, and returns the time until the pod saw it.
    pub(super) async fn grow(mut self, within: Duration) -> Result<Duration> {
        let begun = Instant::now();
        let seen = async {
            let line = self.program.line(within).await?;
            Ok((line, begun.elapsed()))
        };
        let ((), (line, took)) = tokio::try_join!(claims::ask(self.env, self.claim, GROWN), seen)?;
        expect(&line, GROWN).with_context(|| format!("expansion of claim {}", self.claim))?;
        Ok(took)
    }
}

fn expect(line: &str, size: Size) -> Result<()> {
    let requested = size.bytes();
    anyhow::ensure!(
        line.parse() == Ok(requested),
        "{requested} bytes are requested, but the pod sees {line}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expect_rejects_another_size() {
        assert!(expect("4194304", GROWN).is_ok());
        let error = expect("4194303", GROWN).unwrap_err().to_string();
        assert!(error.contains("4194303"), "{error}");
        assert!(expect("", SIZE).is_err());
    }
}
