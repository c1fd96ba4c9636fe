//! A volume in a pod, and a program there that says when it has grown.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cluster::exec::ExecStream;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;

pub(super) const SIZE: Size = Size::mebibytes(1);
pub(super) const GROWN: Size = Size::mebibytes(4);
/// For a growth that the kubelet has to finish after all: then it is in the figure.
pub(super) const GROW_TIME: Duration = Duration::from_secs(300);
/// From the start of the program to its first word, on an emulated processor.
const START_TIME: Duration = Duration::from_secs(60);

pub(super) struct Watched<'a> {
    env: &'a TestEnv<'a>,
    claim: &'a str,
    program: ExecStream,
}

impl<'a> Watched<'a> {
    /// Once this has returned, the program looks at the volume of a claim in a pod.
    pub(super) async fn start(
        env: &'a TestEnv<'a>,
        pod: &str,
        claim: &'a str,
        volume: &str,
    ) -> Result<Watched<'a>> {
        let mut program =
            ExecStream::start(&env.pods(), pod, &["/volume-check", "watch-size", volume]).await?;
        let line = program.line(START_TIME).await?;
        expect(&line, SIZE).with_context(|| format!("volume {volume} before it grows"))?;
        Ok(Watched { env, claim, program })
    }

    /// Asks for more, and returns how long it took until the pod saw it.
    pub(super) async fn grow(mut self, within: Duration) -> Result<Duration> {
        let begun = Instant::now();
        let seen = async {
            let line = self.program.line(within).await?;
            Ok((line, begun.elapsed()))
        };
        let ((), (line, took)) = tokio::try_join!(claims::ask(self.env, self.claim, GROWN), seen)?;
        expect(&line, GROWN).with_context(|| format!("claim {} has grown", self.claim))?;
        Ok(took)
    }
}

fn expect(line: &str, size: Size) -> Result<()> {
    let asked = size.bytes();
    anyhow::ensure!(line.parse() == Ok(asked), "{asked} bytes are asked for, the pod sees {line}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_size_is_no_growth() {
        assert!(expect("4194304", GROWN).is_ok());
        let error = expect("4194303", GROWN).unwrap_err().to_string();
        assert!(error.contains("4194303"), "{error}");
        assert!(expect("", SIZE).is_err());
    }
}
