//! `dbg bundle`: one archive of all that a bug report needs, without secrets.

use std::fmt::Write as _;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use jiff::Timestamp;
use tempfile::NamedTempFile;
use tokio::signal::unix::{SignalKind, signal};

use super::args::{BundleArgs, ConnectionArgs};
use super::connect::Client;
use super::escape::escape;
use super::logs::{note, prefix};
use super::redact::Redactor;
use crate::proto as wire;

/// The largest text of one file. The service sends less; another program in its place might not.
const MAX_FILE_BYTES: usize = 1 << 30;

/// The most files of an archive. A node has a few dozen components at most.
const MAX_FILES: usize = 1000;

pub(super) async fn run(connection: &ConnectionArgs, args: BundleArgs) -> anyhow::Result<ExitCode> {
    // They are handled before the file is created, so that it is removed.
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut hang_up = signal(SignalKind::hangup()).context("handle SIGHUP")?;
    tokio::select! {
        written = write(connection, args) => written,
        _ = interrupt.recv() => Err(anyhow!("interrupted; no archive was written")),
        _ = terminate.recv() => Err(anyhow!("terminated; no archive was written")),
        _ = hang_up.recv() => Err(anyhow!("the terminal was closed; no archive was written")),
    }
}

async fn write(connection: &ConnectionArgs, args: BundleArgs) -> anyhow::Result<ExitCode> {
    let now = Timestamp::now();
    let output = args.output.unwrap_or_else(|| default_name(now));
    // The file is created first: a missing directory or a full disk is no reason to collect everything in vain.
    let mut archive = Archive::create(&output, now)?;
    let mut client = Client::connect(connection).await?;
    let described = client.service.describe(wire::DescribeRequest {}).await;
    let described = described.map_err(|status| client.explain(status))?.into_inner();

    archive.add("node-debug.txt", &summary(&described, now))?;
    for component in &described.components {
        let log = log(&mut client, &component.name).await?;
        archive.add(&format!("logs/{}.log", file_name(&component.name)), &log)?;
    }
    archive.add("conditions.txt", &conditions(&mut client, &described.conditions).await?)?;
    for (name, content) in state(&mut client).await? {
        archive.add(&format!("state/{}", file_name(&name)), &Redactor::text(&content))?;
    }
    archive.finish(&output)?;
    writeln!(io::stdout(), "{}", output.display())?;
    Ok(ExitCode::SUCCESS)
}

fn default_name(now: Timestamp) -> PathBuf {
    PathBuf::from(format!("node-debug-{}.tar", now.strftime("%Y%m%dT%H%M%SZ")))
}

/// Returns a name that is a single component of a path, whatever the service sent.
fn file_name(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().take(100).map(safe).collect();
    if name.starts_with(|c: char| c.is_ascii_alphanumeric()) { name } else { format!("_{name}") }
}

fn summary(described: &wire::DescribeResponse, now: Timestamp) -> String {
    let mut text = format!(
        "collected {now} by dbg {}\nnode-debug {}\n\n",
        env!("CARGO_PKG_VERSION"),
        escape(described.version.as_bytes())
    );
    for component in &described.components {
        let line = format!(
            "component {}: {} lines, {} bytes, {} dropped, from {} {}",
            component.name,
            component.lines,
            component.bytes,
            component.dropped_lines,
            component.source,
            component.problem
        );
        text.push_str(escape(Redactor::default().line(&line).as_bytes()).trim_end());
        text.push('\n');
    }
    text
}

async fn log(client: &mut Client, component: &str) -> anyhow::Result<String> {
    let request = wire::LogsRequest { component: component.to_owned(), ..wire::LogsRequest::default() };
    let batches = client.service.logs(request).await;
    let mut batches = batches.map_err(|status| client.explain(status))?.into_inner();
    let mut redactor = Redactor::default();
    let mut text = String::new();
    while let Some(batch) = batches.message().await.map_err(|status| client.explain(status))? {
        for line in &batch.lines {
            // The text is redacted before it is escaped: an escape character could hide the form of a secret.
            let raw = String::from_utf8_lossy(&line.text);
            let redacted = redactor.line(&raw);
            let note = note(line).unwrap_or_default();
            writeln!(text, "{} {}{note}", prefix(line), escape(redacted.as_bytes()))?;
        }
        anyhow::ensure!(
            text.len() <= MAX_FILE_BYTES,
            "the log of {component} is larger than {MAX_FILE_BYTES} bytes"
        );
    }
    Ok(text)
}

async fn conditions(client: &mut Client, known: &[wire::KnownCondition]) -> anyhow::Result<String> {
    let mut text = String::new();
    for condition in known.iter().filter(|condition| condition.argument.is_empty()) {
        let request = wire::ConditionRequest { name: condition.name.clone(), arguments: Vec::new() };
        let result = match client.service.condition(request).await.map(tonic::Response::into_inner) {
            Ok(wire::ConditionResponse { met: true, detail }) => format!("met: {detail}"),
            Ok(wire::ConditionResponse { met: false, detail }) => format!("not met: {detail}"),
            Err(status) => format!("not evaluated: {:#}", client.explain(status)),
        };
        let line = format!("{}: {result}", condition.name);
        writeln!(text, "{}", escape(Redactor::default().line(&line).as_bytes()))?;
        anyhow::ensure!(
            text.len() <= MAX_FILE_BYTES,
            "the conditions of the node are larger than {MAX_FILE_BYTES} bytes"
        );
    }
    Ok(text)
}

async fn state(client: &mut Client) -> anyhow::Result<Vec<(String, String)>> {
    let parts = client.service.state(wire::StateRequest {}).await;
    let mut parts = parts.map_err(|status| client.explain(status))?.into_inner();
    let mut files = StateFiles::default();
    while let Some(part) = parts.message().await.map_err(|status| client.explain(status))? {
        files.add(part.name, part.content)?;
    }
    let text = |(name, content): (String, Vec<u8>)| (name, String::from_utf8_lossy(&content).into_owned());
    Ok(files.files.into_iter().map(text).collect())
}

/// The files of the node's state.
#[derive(Default)]
struct StateFiles {
    files: Vec<(String, Vec<u8>)>,
    bytes: usize,
}

impl StateFiles {
    /// Appends to the newest file, or begins another one.
    fn add(&mut self, name: String, content: Vec<u8>) -> anyhow::Result<()> {
        self.bytes += name.len() + content.len();
        anyhow::ensure!(
            self.bytes <= MAX_FILE_BYTES,
            "the state of the node is larger than {MAX_FILE_BYTES} bytes"
        );
        match self.files.last_mut() {
            Some((newest, bytes)) if *newest == name => bytes.extend(content),
            _ => {
                anyhow::ensure!(
                    self.files.len() < MAX_FILES,
                    "the state of the node has more than {MAX_FILES} files"
                );
                self.files.push((name, content));
            }
        }
        Ok(())
    }
}

/// An archive that gets its name when it is complete.
struct Archive {
    tar: tar::Builder<NamedTempFile>,
    time: u64,
    files: usize,
}

impl Archive {
    fn create(output: &Path, now: Timestamp) -> anyhow::Result<Self> {
        let context = || format!("write {}", output.display());
        if output.symlink_metadata().is_ok() {
            let error = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(error).with_context(|| format!("{}; choose another --output", context()));
        }
        let directory = output.parent().filter(|directory| !directory.as_os_str().is_empty());
        let mut builder = tempfile::Builder::new();
        builder.prefix(".node-debug-").permissions(Permissions::from_mode(0o600));
        let file = builder.tempfile_in(directory.unwrap_or(Path::new("."))).with_context(context)?;
        Ok(Self { tar: tar::Builder::new(file), time: u64::try_from(now.as_second()).unwrap_or(0), files: 0 })
    }

    fn add(&mut self, name: &str, content: &str) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.files < MAX_FILES,
            "the service has more than {MAX_FILES} files for the archive"
        );
        self.files += 1;
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o600);
        header.set_mtime(self.time);
        header.set_size(content.len() as u64);
        self.tar
            .append_data(&mut header, format!("node-debug/{name}"), content.as_bytes())
            .with_context(|| format!("add {name} to the archive"))
    }

    fn finish(self, output: &Path) -> anyhow::Result<File> {
        let context = || format!("write {}", output.display());
        let file = self.tar.into_inner().with_context(context)?;
        file.as_file().sync_all().with_context(context)?;
        file.persist_noclobber(output).with_context(context)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The service may send names with slashes or `..`.
    #[rstest]
    #[case::plain("kubelet", "kubelet")]
    #[case::path("../../etc/passwd", "_.._.._etc_passwd")]
    #[case::absolute("/etc/passwd", "__etc_passwd")]
    #[case::empty("", "_")]
    fn file_names_stay_inside_the_archive(#[case] name: &str, #[case] expected: &str) {
        assert_eq!(file_name(name), expected);
    }

    /// Another program in the place of the service may send any number of parts.
    #[test]
    fn too_many_state_files_are_refused() {
        let mut files = StateFiles::default();
        for number in 0..2 * MAX_FILES {
            files.add(format!("{}", number / 2), vec![0]).unwrap();
        }
        assert_eq!(files.files.len(), MAX_FILES);
        let error = files.add(String::new(), Vec::new()).unwrap_err();
        assert!(error.to_string().contains("more than 1000 files"), "{error}");
    }

    #[test]
    fn adding_too_many_archive_files_fails() {
        let directory = tempfile::tempdir().unwrap();
        let mut archive = Archive::create(&directory.path().join("report.tar"), Timestamp::now()).unwrap();
        for number in 0..MAX_FILES {
            archive.add(&format!("logs/{number}.log"), "").unwrap();
        }
        assert!(archive.add("logs/more.log", "").is_err());
    }

    #[test]
    fn an_existing_file_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.tar");
        std::fs::write(&path, "precious").unwrap();
        let error = Archive::create(&path, Timestamp::now()).err().unwrap();
        assert!(format!("{error:#}").contains("choose another --output"), "{error:#}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
