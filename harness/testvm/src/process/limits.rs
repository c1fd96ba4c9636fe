//! The time that a program has that is run to its end.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, timeout_at};

use super::running::Process;
use crate::progress::seconds;

/// The limits of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The time from the start to the end.
    pub(super) total: Duration,
    /// The time without a byte of output, after which a download is taken for stalled.
    pub(super) silence: Option<Duration>,
}

/// The limits of programs that work on local files.
pub(super) const LOCAL: Limits = Limits { total: Duration::from_secs(30 * 60), silence: None };
/// The limits of programs that download, and then often compile: on two slow processors, a first build of Kubernetes takes
/// a quarter of an hour, and its longest silence, while it links, some minutes.
pub(super) const DOWNLOADS: Limits =
    Limits { total: Duration::from_secs(60 * 60), silence: Some(Duration::from_secs(20 * 60)) };

impl Limits {
    /// Waits for the end of the program. Returns the reason if it has exceeded a limit; it still runs then.
    pub(super) async fn watch(&self, process: &mut Process) -> Result<Option<String>> {
        let end = Instant::now() + self.total;
        let mut written = process.output.length()?;
        loop {
            let check = self.silence.map_or(end, |silence| end.min(Instant::now() + silence));
            if let Ok(status) = timeout_at(check, process.wait()).await {
                return status.map(|_| None);
            }
            if Instant::now() >= end {
                return Ok(Some(format!("did not end within {}", seconds(self.total))));
            }
            let now = process.output.length()?;
            if now == written {
                let silence = seconds(self.silence.unwrap_or_default());
                return Ok(Some(format!("wrote nothing for {silence}, so a download may have stalled")));
            }
            written = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Program;
    use super::*;

    async fn reason(script: &str, limits: Limits) -> String {
        let program = Program { limits, ..Program::new("sh").args(["-c", script]) };
        program.run().await.unwrap_err().to_string()
    }

    /// The whole process group is stopped, and the error has the output.
    #[tokio::test]
    async fn program_exceeding_a_limit_is_stopped() {
        let total = |total| Limits { total, silence: None };
        let (error, child) = output_of_stopped("echo fetching; sleep 1000 & echo $!; wait", total).await;
        assert!(error.contains("sh did not end within"), "{error}");
        assert!(super::super::tests::ends_soon(child).await);
        let silence = |silence| Limits { total: Duration::from_secs(600), silence: Some(silence) };
        let (error, _) = output_of_stopped("echo fetching; echo $$; exec sleep 1000", silence).await;
        assert!(error.contains("wrote nothing for"), "{error}");
    }

    /// Returns the error, and the number that the script writes. A script that has not begun is late, and gets more time.
    async fn output_of_stopped(script: &str, limits: impl Fn(Duration) -> Limits) -> (String, i32) {
        for seconds in [0.3, 3.0, 60.0] {
            let error = reason(script, limits(Duration::from_secs_f64(seconds))).await;
            if let Some(number) = error.lines().find_map(|line| line.parse().ok()) {
                assert!(error.contains("fetching"), "{error}");
                return (error, number);
            }
        }
        panic!("{script}: nothing was written");
    }

    /// It runs for longer than the limit on its silence.
    #[tokio::test]
    async fn writing_program_is_not_stopped() {
        let (pause, total) = (Duration::from_millis(400), Duration::from_secs(600));
        // A script that is late writes nothing for longer than it sleeps.
        for times in [1, 10, 100] {
            let limits = Limits { total, silence: Some(pause * times * 5 / 2) };
            let script = format!("for i in 1 2 3; do sleep {}; echo $i; done", (pause * times).as_secs_f64());
            let program = Program::new("sh").args(["-c", &script]);
            if (Program { limits, ..program }).run().await.is_ok() {
                return;
            }
        }
        panic!("it was stopped each time");
    }
}
