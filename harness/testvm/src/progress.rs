//! Live progress: spinners on a terminal, and otherwise timestamped lines.
//!
//! Both distinguish a slow step from a hung one: a spinner counts its seconds, and without a terminal a long
//! step prints a line every `HEARTBEAT`.

mod step_times;

use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

pub(crate) use self::step_times::StepTimes;

const HEARTBEAT: Duration = Duration::from_secs(30);

/// The display of all steps in progress. Clones share one display.
#[derive(Clone, Debug)]
pub struct Progress {
    display: Display,
    times: StepTimes,
    ended: Arc<Mutex<Vec<(String, Duration)>>>,
}

#[derive(Clone, Debug)]
enum Display {
    Terminal(MultiProgress),
    Plain(Arc<Mutex<Vec<Weak<PlainStep>>>>),
}

#[derive(Debug)]
struct PlainStep {
    title: String,
    started: Instant,
    note: Mutex<String>,
}

impl Progress {
    /// Creates a display on standard error that says how long each step took the last time.
    pub(crate) fn new(times: StepTimes) -> Progress {
        Progress { display: Display::new(), times, ended: Arc::default() }
    }

    /// Returns the titles of the steps that have ended, with their times.
    pub fn ended(&self) -> Vec<(String, Duration)> {
        lock(&self.ended).clone()
    }

    /// Begins a step. It is displayed until [`done`](Step::done). A step that is dropped before is displayed
    /// as stopped.
    #[must_use]
    pub fn step(&self, title: impl Into<String>) -> Step {
        let title = title.into();
        let last = self.last_time(&title);
        let shown = match &self.display {
            Display::Terminal(multi) => {
                let bar = multi.add(ProgressBar::new_spinner().with_style(running_style()));
                bar.set_prefix(first_text(&title, last));
                bar.enable_steady_tick(Duration::from_millis(120));
                Shown::Bar(bar)
            }
            Display::Plain(steps) => {
                print_line(&first_text(&format!("{title} ..."), last));
                let step = Arc::new(PlainStep {
                    title: title.clone(),
                    started: Instant::now(),
                    note: Mutex::default(),
                });
                lock(steps).push(Arc::downgrade(&step));
                Shown::Plain(step)
            }
        };
        Step { progress: self.clone(), title, started: Instant::now(), shown, ended: false }
    }

    /// Records the time of work that succeeded and is no step, as that of a step of this title.
    pub fn record_time(&self, title: &str, time: Duration) {
        // The time is for information. A full disk must not fail the run here.
        self.times.record(title, time).ok();
    }

    /// Returns the time that a step of this title last took, if it is known. Short steps have none.
    pub fn last_time(&self, title: &str) -> Option<Duration> {
        self.times.last(title)
    }

    /// Prints a line above the steps in progress.
    pub fn line(&self, text: impl AsRef<str>) {
        match &self.display {
            // A closed terminal must not fail the run.
            Display::Terminal(multi) => drop(multi.println(text.as_ref())),
            Display::Plain(_) => print_line(text.as_ref()),
        }
    }

    /// Removes the live display, so that ordinary output can follow.
    pub fn finish(&self) {
        if let Display::Terminal(multi) = &self.display {
            drop(multi.clear());
        }
    }
}

impl Display {
    fn new() -> Display {
        if std::io::stderr().is_terminal() {
            return Display::Terminal(MultiProgress::new());
        }
        let steps = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::downgrade(&steps);
        std::thread::spawn(move || heartbeat(&heard));
        Display::Plain(steps)
    }
}

/// One step of work in progress.
#[derive(Debug)]
pub struct Step {
    progress: Progress,
    title: String,
    started: Instant,
    shown: Shown,
    ended: bool,
}

#[derive(Clone, Debug)]
enum Shown {
    Bar(ProgressBar),
    Plain(Arc<PlainStep>),
}

impl Shown {
    fn note(&self, text: impl Into<Cow<'static, str>>) {
        match self {
            Shown::Bar(bar) => bar.set_message(text),
            Shown::Plain(step) => *lock(&step.note) = text.into().into_owned(),
        }
    }
}

impl Step {
    /// Sets the text about the current work of the step. It is cheap enough for every line of a build's
    /// output.
    pub fn note(&self, text: impl Into<Cow<'static, str>>) {
        self.shown.note(text);
    }

    /// Returns a function with which another thread can [`note`](Step::note) for this step.
    pub fn notes(&self) -> impl Fn(String) + Send + 'static + use<> {
        let shown = self.shown.clone();
        move |text| shown.note(text)
    }

    /// Returns a function that notes each line of a program's output.
    pub fn line_notes(&self) -> impl Fn(&str) + Send + 'static + use<> {
        let note = self.notes();
        move |line| note(line.trim().to_owned())
    }

    /// Returns the time since the step began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Ends the step as succeeded. `summary` may be empty.
    pub fn done(mut self, summary: impl AsRef<str>) {
        self.progress.record_time(&self.title, self.elapsed());
        self.end("ok", summary.as_ref());
    }

    /// Ends the step as failed. The caller reports the error itself.
    pub fn failed(mut self, summary: impl AsRef<str>) {
        self.end("FAILED", summary.as_ref());
    }

    fn end(&mut self, word: &str, summary: &str) {
        self.ended = true;
        lock(&self.progress.ended).push((self.title.clone(), self.elapsed()));
        let colon = if summary.is_empty() { "" } else { ": " };
        let line = format!("{word:<6} {} ({}){colon}{summary}", self.title, seconds(self.elapsed()));
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
        self.progress.line(line);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.ended {
            self.end("ended", "without success");
        }
    }
}

/// Returns a duration as text: `7.2 s`, `3 min 09 s`.
#[must_use]
pub fn seconds(duration: Duration) -> String {
    if duration < Duration::from_secs(60) {
        return format!("{:.1} s", duration.as_secs_f64());
    }
    format!("{} min {:02} s", duration.as_secs() / 60, duration.as_secs() % 60)
}

/// Returns the text of a step that begins, with the time that it took the last time.
fn first_text(title: &str, last: Option<Duration>) -> String {
    match last {
        None => title.to_owned(),
        Some(time) => format!("{title} (took {} last time)", seconds(time)),
    }
}

fn running_style() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn heartbeat(steps: &Weak<Mutex<Vec<Weak<PlainStep>>>>) {
    loop {
        std::thread::sleep(HEARTBEAT);
        let Some(steps) = steps.upgrade() else { return };
        let mut steps = lock(&steps);
        steps.retain(|step| step.strong_count() > 0);
        for step in steps.iter().filter_map(Weak::upgrade) {
            if step.started.elapsed() < HEARTBEAT {
                continue;
            }
            let note = lock(&step.note).clone();
            let dash = if note.is_empty() { "" } else { " - " };
            print_line(&format!("{} ... {}{dash}{note}", step.title, seconds(step.started.elapsed())));
        }
    }
}

fn print_line(text: &str) {
    let now = jiff::Zoned::now().strftime("%H:%M:%S").to_string();
    // A closed standard error must not fail the run.
    drop(writeln!(std::io::stderr(), "{now} {text}"));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_step_shows_previous_duration() {
        let directory = tempfile::tempdir().unwrap();
        let times = StepTimes::at(directory.path().join("times"));
        let progress = Progress::new(times.clone());
        let mut step = progress.step("build it");
        step.started = Instant::now().checked_sub(Duration::from_secs(12)).unwrap();
        step.done("");
        assert!(times.last("build it").is_some_and(|last| last >= Duration::from_secs(12)));
        let last = Some(Duration::from_secs(12));
        assert_eq!(first_text("build it ...", last), "build it ... (took 12.0 s last time)");
        assert_eq!(first_text("build it", times.last("build")), "build it");
    }

    #[test]
    fn failed_steps_have_no_time() {
        let directory = tempfile::tempdir().unwrap();
        let times = StepTimes::at(directory.path().join("times"));
        let progress = Progress::new(times.clone());
        let began = Instant::now().checked_sub(Duration::from_secs(12)).unwrap();
        for end in [|step: Step| step.failed(""), drop] {
            let mut step = progress.step("build it");
            step.started = began;
            end(step);
        }
        assert_eq!(times.last("build it"), None);
    }
}
