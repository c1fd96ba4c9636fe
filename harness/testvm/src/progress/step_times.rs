//! The times of the steps of earlier runs, in a file of the cache.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

/// A shorter step is not recorded. Most of them are builds in which nothing has changed, and the next one may take minutes again.
const MIN_RECORDED: Duration = Duration::from_secs(10);
/// The number of steps in the file. Some titles have the name of a file or a process, and are never used again.
const MAX_STEPS: usize = 200;

/// The time that each step last took, on this machine.
#[derive(Clone, Debug)]
pub(crate) struct StepTimes {
    /// A line for each step, the last one at the end: its time in seconds, a space, and its title.
    path: PathBuf,
}

impl StepTimes {
    /// Returns the times in a file, which need not exist.
    pub(crate) fn at(path: PathBuf) -> StepTimes {
        StepTimes { path }
    }

    /// Returns the time that the step of this title took when it last took as long as [`MIN_RECORDED`], or `None` if that is not known.
    pub(crate) fn last(&self, title: &str) -> Option<Duration> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        let (seconds, _) =
            text.lines().filter_map(|line| line.split_once(' ')).find(|(_, of)| *of == title)?;
        seconds.parse().ok().map(Duration::from_secs)
    }

    /// Records the time of a step that succeeded. Of two processes that record concurrently, one may lose its time.
    pub(crate) fn record(&self, title: &str, time: Duration) -> Result<()> {
        if time < MIN_RECORDED || title.contains('\n') {
            return Ok(());
        }
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let of_others = |line: &&str| line.split_once(' ').is_some_and(|(_, of)| of != title);
        let mut lines: Vec<&str> = text.lines().filter(of_others).collect();
        let new = format!("{} {title}", time.as_secs());
        lines.push(&new);
        let kept = lines.len().saturating_sub(MAX_STEPS);
        // Another process reads the old or the new content.
        let mut file = tempfile::NamedTempFile::new_in(self.path.parent().unwrap_or(Path::new(".")))?;
        writeln!(file, "{}", lines[kept..].join("\n"))?;
        file.persist(&self.path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times() -> (tempfile::TempDir, StepTimes) {
        let directory = tempfile::tempdir().unwrap();
        let times = StepTimes::at(directory.path().join("step-times"));
        (directory, times)
    }

    #[test]
    fn the_last_long_time_is_known() {
        let (_directory, times) = times();
        assert_eq!(times.last("build it"), None);
        for seconds in [370, 20, 2] {
            times.record("build it", Duration::from_secs(seconds)).unwrap();
        }
        times.record("build", Duration::from_secs(30)).unwrap();
        assert_eq!(times.last("build it"), Some(Duration::from_secs(20)));
        assert_eq!(times.last("build"), Some(Duration::from_secs(30)));
        assert_eq!(std::fs::read_to_string(&times.path).unwrap(), "20 build it\n30 build\n");
    }

    #[test]
    fn old_steps_are_forgotten() {
        let (_directory, times) = times();
        for step in 0..MAX_STEPS + 2 {
            times.record(&step.to_string(), MIN_RECORDED).unwrap();
        }
        assert_eq!((times.last("0"), times.last("1")), (None, None));
        assert_eq!(times.last("2"), Some(MIN_RECORDED));
    }

    #[test]
    fn a_damaged_file_is_replaced() {
        let (_directory, times) = times();
        std::fs::write(&times.path, "x build\n\n7").unwrap();
        assert_eq!(times.last("build"), None);
        times.record("build", MIN_RECORDED).unwrap();
        assert_eq!(std::fs::read_to_string(&times.path).unwrap(), "10 build\n");
    }
}
