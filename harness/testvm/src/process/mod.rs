//! Child processes. Each has one owner that stops and reaps it, however the owner ends.
//!
//! - If the owner is dropped, it kills the whole process group and reaps the child before `drop` returns.
//! - If the owner is killed by SIGKILL, the kernel kills the child (`PR_SET_PDEATHSIG`, set by setpriv).
//!   That signal follows the *thread* that forked. Each child therefore has a thread that spawns it and then
//!   waits for it.
//! - If the child ends before other processes of its group, they are killed.
//! - A child that is run to its end has a time limit. Its temporary files are in the [scratch directory](crate::scratch) of
//!   this process.
//! - A child has no proxy, unless it [downloads](Program::downloads): the servers of a test are on the loopback.

mod finished;
mod limits;
mod output;
mod running;

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
pub use finished::{Finished, tail};
use limits::Limits;
use output::{LineSink, Output, input};
pub use running::Process;

/// Directories of programs that may be missing in an ordinary user's `PATH` (`mkfs.xfs`, `mke2fs`).
const SYSTEM_DIRECTORIES: [&str; 2] = ["/usr/sbin", "/sbin"];

/// The variables of the environment that name a proxy.
const PROXIES: [&str; 3] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];

/// The time that a program has to end after SIGTERM, if it exceeded its limit.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// A program to be run. Its standard input is empty by default.
#[must_use]
pub struct Program {
    name: String,
    is_installed: bool,
    /// The command that starts it.
    command: Command,
    limits: Limits,
    input: Vec<u8>,
    log: Option<PathBuf>,
    stderr_lines: Option<LineSink>,
}

impl Program {
    /// Creates a program that inherits the environment, except its proxies, and the working directory.
    pub fn new(program: impl Into<OsString>) -> Program {
        let program = program.into();
        let path = find(&program);
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(path.as_deref().unwrap_or(Path::new(&program)));
        command.process_group(0);
        for (name, _) in proxies() {
            command.env_remove(name);
        }
        let scratch = tempfile::env::temp_dir();
        if scratch != std::env::temp_dir() {
            command.env("TMPDIR", scratch);
        }
        Program {
            name: Path::new(&program).file_name().unwrap_or(&program).to_string_lossy().into_owned(),
            is_installed: path.is_some(),
            command,
            limits: limits::LOCAL,
            input: Vec::new(),
            log: None,
            stderr_lines: None,
        }
    }

    /// Sets the program's name in messages, if its file name is not clear enough.
    pub fn named(mut self, name: &str) -> Program {
        name.clone_into(&mut self.name);
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Program {
        self.command.arg::<OsString>(arg.into());
        self
    }

    /// Adds arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Program {
        self.command.args::<_, OsString>(args.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Program {
        self.command.env::<OsString, OsString>(name.into(), value.into());
        self
    }

    /// Removes an environment variable.
    pub fn env_remove(mut self, name: impl Into<OsString>) -> Program {
        self.command.env_remove::<OsString>(name.into());
        self
    }

    /// Has the program use the proxies of the environment, because it fetches from other machines. Any other program would
    /// send requests for servers of this machine to the proxy, too. The time limit becomes that of a first build.
    pub fn downloads(mut self) -> Program {
        self.command.envs(proxies());
        self.limits = limits::DOWNLOADS;
        self
    }

    /// Sets the time that the program has if it is [run](Program::run) to its end.
    pub fn timeout(mut self, timeout: Duration) -> Program {
        self.limits = Limits { total: timeout, silence: None };
        self
    }

    /// Sets the working directory.
    pub fn current_dir(mut self, directory: impl Into<PathBuf>) -> Program {
        self.command.current_dir::<PathBuf>(directory.into());
        self
    }

    /// Sets the bytes of its standard input.
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Program {
        self.input = bytes.into();
        self
    }

    /// Appends standard output and error to this file rather than capturing them.
    pub fn log(mut self, path: impl Into<PathBuf>) -> Program {
        self.log = Some(path.into());
        self
    }

    /// Calls `sink` for each line of standard error as it is written. The line is captured or logged too.
    pub fn on_stderr_line(mut self, sink: impl FnMut(&str) + Send + 'static) -> Program {
        self.stderr_lines = Some(Box::new(sink));
        self
    }

    /// Starts the program.
    ///
    /// # Errors
    /// The program is not installed, or cannot be started.
    pub fn spawn(self) -> Result<Process> {
        let Program { name, mut command, .. } = self;
        let directories = SYSTEM_DIRECTORIES.join(", ");
        anyhow::ensure!(self.is_installed, "{name} is not installed (looked in PATH and {directories})");
        let output =
            Output::open(self.log.as_deref()).with_context(|| format!("open the output of {name}"))?;
        command.stdin(input(&self.input).with_context(|| format!("prepare the input of {name}"))?);
        command.stdout(output.stdout.try_clone()?);
        let tee = match self.stderr_lines {
            Some(sink) => {
                command.stderr(Stdio::piped());
                Some((sink, output.stderr.try_clone()?))
            }
            None => {
                command.stderr(output.stderr.try_clone()?);
                None
            }
        };
        Process::start(name, command, tee, output)
    }

    /// Runs the program to its end. Another exit code than 0 is an error.
    ///
    /// # Errors
    /// The program cannot be started, or does not exit with 0; the message has its last lines of output.
    pub async fn run(self) -> Result<Finished> {
        let finished = self.finish().await?;
        anyhow::ensure!(finished.status.success(), "{}", finished.failure());
        Ok(finished)
    }

    /// Runs the program to its end, whatever its status.
    ///
    /// # Errors
    /// The program cannot be started, or exceeds its time limit; the message has its last lines of output.
    pub async fn finish(self) -> Result<Finished> {
        let limits = self.limits;
        let mut process = self.spawn()?;
        let exceeded = limits.watch(&mut process).await?;
        let status = process.end(STOP_GRACE).await?;
        let (stdout, stderr) = process.output.read()?;
        let log = process.output.log.clone();
        let finished = Finished { name: process.name.clone(), status, stdout, stderr, log };
        match exceeded {
            None => Ok(finished),
            Some(exceeded) => {
                let (output, hint) = finished.output();
                anyhow::bail!("{} {exceeded}, and was stopped{hint}:\n{output}", finished.name)
            }
        }
    }
}

/// Returns git for the repository of `root`, also in a hook, whose environment names another one.
pub fn git(root: &Path) -> Program {
    let git = Program::new("git").current_dir(root);
    ["GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"].into_iter().fold(git, Program::env_remove)
}

/// Returns the path of a program, or `None` if it is not installed.
#[must_use]
pub fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(PathBuf::from(program)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(SYSTEM_DIRECTORIES.map(PathBuf::from));
    directories.map(|directory| directory.join(program)).find(|candidate| candidate.is_file())
}

/// Returns the variables that name a proxy, in upper and in lower case, with their values. Programs read either.
fn proxies() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|(variable, _)| PROXIES.iter().any(|name| variable.eq_ignore_ascii_case(name)))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use nix::sys::signal::kill;
    use nix::unistd::Pid;

    use super::*;

    fn shell(script: &str) -> Program {
        Program::new("sh").args(["-c", script])
    }

    fn alive(pid: i32) -> bool {
        // Signal 0 succeeds for a zombie, so read its state.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit(')').next().unwrap_or_default().trim().chars().next();
        kill(Pid::from_raw(pid), None).is_ok() && !matches!(state, Some('Z' | 'X') | None)
    }

    #[tokio::test]
    async fn input_and_output_are_passed() {
        let finished = shell("cat; echo problem >&2").input("hello").run().await.unwrap();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("hello", "problem\n"));
    }

    #[tokio::test]
    async fn failure_has_status_and_last_output() {
        let error = shell("echo no space left >&2; exit 3").run().await.unwrap_err().to_string();
        assert!(error.contains("sh ended with exit status: 3") && error.contains("no space left"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let error = Program::new("no-such-program-here").run().await.unwrap_err().to_string();
        assert!(error.starts_with("no-such-program-here is not installed"), "{error}");
    }

    #[tokio::test]
    async fn only_downloading_programs_use_proxies() {
        // The environment of this process cannot be changed safely, so the check runs in a child with these variables.
        let proxies = ["HTTP_PROXY", "https_proxy", "All_Proxy"];
        let child = proxies.iter().fold(Program::new(std::env::current_exe().unwrap()), |child, name| {
            child.env(name, "http://proxy.invalid:3128")
        });
        child.args(["--exact", "--ignored", "process::tests::with_proxies"]).run().await.unwrap();
    }

    #[tokio::test]
    #[ignore = "the test only_downloading_programs_use_proxies runs it with proxies"]
    async fn with_proxies() {
        let proxies = |printed: &str| printed.matches("=http://proxy.invalid:3128\n").count();
        let other = Program::new("env").run().await.unwrap().stdout;
        let downloading = Program::new("env").downloads().run().await.unwrap().stdout;
        assert_eq!((proxies(&other), proxies(&downloading)), (0, 3));
        let given = Program::new("env").env("HTTP_PROXY", "http://other.invalid").run().await.unwrap().stdout;
        assert!(given.contains("HTTP_PROXY=http://other.invalid"), "{given}");
    }

    #[tokio::test]
    async fn dropping_kills_the_process_group() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process = shell("sleep 1000 & echo $!; wait").log(&log).spawn().unwrap();
        let child: i32 = wait_for_line(&log).await.parse().unwrap();
        let leader = process.id();
        assert!(alive(leader) && alive(child));
        drop(process);
        assert!(!alive(leader));
        assert!(ends_soon(child).await);
    }

    #[tokio::test]
    async fn remaining_processes_of_program_are_killed() {
        let finished = shell("sleep 1000 >/dev/null 2>&1 & echo $!").run().await.unwrap();
        assert!(ends_soon(finished.stdout.trim().parse().unwrap()).await);
    }

    #[tokio::test]
    async fn stop_sends_sigkill_after_ignored_sigterm() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process =
            shell("trap '' TERM; echo ready; while :; do sleep 0.05; done").log(&log).spawn().unwrap();
        wait_for_line(&log).await;
        let status = process.stop(Duration::from_millis(200)).await.unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }

    #[tokio::test]
    async fn stderr_lines_are_passed_on() {
        let (sender, lines) = mpsc::channel();
        let finished = shell("echo one >&2; echo two >&2")
            .on_stderr_line(move |line| sender.send(line.to_owned()).unwrap())
            .run()
            .await
            .unwrap();
        assert_eq!(lines.iter().collect::<Vec<_>>(), ["one", "two"]);
        assert_eq!(finished.stderr, "one\ntwo\n");
    }

    async fn wait_for_line(log: &Path) -> String {
        for _ in 0..6000 {
            let text = std::fs::read_to_string(log).unwrap_or_default();
            if let Some((line, _)) = text.split_once('\n') {
                return line.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("nothing was written to {}", log.display());
    }

    /// Waits for the end of an orphan. init reaps it some time after it was killed.
    pub(super) async fn ends_soon(pid: i32) -> bool {
        for _ in 0..6000 {
            if !alive(pid) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }
}
