//! `dbg bundle`: one archive of all that a bug report needs, without secrets.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use jiff::Timestamp;
use tempfile::NamedTempFile;
use tonic::Status;

use super::args::BundleArgs;
use super::connect::Client;
use super::escape::escape_lines;
use super::redact::Redactor;
use crate::proto as wire;

/// The largest archive. The service sends less; another program in its place might not.
const MAX_BYTES: usize = 256 << 20;

/// What a file has in the archive besides its content.
const HEADER_BYTES: usize = 512;

pub(super) async fn run(socket: &Path, args: BundleArgs) -> anyhow::Result<ExitCode> {
    let now = Timestamp::now();
    let output = args
        .output
        .unwrap_or_else(|| PathBuf::from(format!("node-debug-{}.tar", now.strftime("%Y%m%dT%H%M%SZ"))));
    let context = || format!("write {}; choose another --output", output.display());
    // Everything is collected before the file is created, so that dbg leaves no file if it is interrupted.
    ensure!(output.symlink_metadata().is_err(), "{}: the file exists", context());
    let directory = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(directory.is_dir(), "{}: {} is not a directory", context(), directory.display());
    let mut client = Client::connect(socket).await?;
    let archive = collect(&mut client, now).await?;
    write(directory, &output, &archive).with_context(context)?;
    writeln!(io::stdout(), "{}", output.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the whole file or none. Only its owner may read it.
fn write(directory: &Path, output: &Path, archive: &[u8]) -> io::Result<()> {
    let mut file = NamedTempFile::new_in(directory)?;
    file.write_all(archive)?;
    file.as_file().sync_all()?;
    file.persist_noclobber(output)?;
    Ok(())
}

/// Returns the archive.
async fn collect(client: &mut Client, now: Timestamp) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive { tar: tar::Builder::new(Vec::new()), time: now.as_second().try_into()? };
    let described = client.describe().await?;
    archive.add("node-debug.txt", &summary(&described, now))?;
    for component in &described.components {
        let log = log(client, &component.name, archive.room()).await?;
        archive.add(&format!("logs/{}.log", component.name), &log)?;
    }
    let conditions = conditions(client, &described.conditions).await?;
    archive.add("conditions.txt", conditions.as_bytes())?;
    for (name, content) in state(client, archive.room()).await? {
        archive.add(&format!("state/{name}"), &content)?;
    }
    Ok(archive.tar.into_inner()?)
}

fn summary(described: &wire::DescribeResponse, now: Timestamp) -> Vec<u8> {
    let mut text =
        format!("collected {now} by dbg {}\nnode-debug {}\n", env!("CARGO_PKG_VERSION"), described.version);
    for wire::Component { name, source } in &described.components {
        text.extend(["component ", name, " from ", source, "\n"]);
    }
    text.into_bytes()
}

/// Returns the log, and at its end the reason if there is no more. It ends when the archive has no room for it.
async fn log(client: &mut Client, component: &str, room: usize) -> anyhow::Result<Vec<u8>> {
    let request = wire::LogsRequest { component: component.to_owned(), ..wire::LogsRequest::default() };
    let mut content = Vec::new();
    let read = async {
        let mut parts = client.service.logs(request).await?.into_inner();
        while content.len() <= room
            && let Some(part) = parts.message().await?
        {
            content.extend(part.content);
        }
        Ok(())
    };
    if let Err(status) = read.await {
        let reason = refusal(client, status)?;
        content.extend(format!("could not be read: {reason}\n").bytes());
    }
    Ok(content)
}

async fn conditions(client: &mut Client, known: &[wire::KnownCondition]) -> anyhow::Result<String> {
    let mut text = String::new();
    for condition in known.iter().filter(|condition| condition.argument.is_empty()) {
        let name = condition.name.clone();
        let request = wire::ConditionRequest { name, ..wire::ConditionRequest::default() };
        let result = match client.service.condition(request).await.map(tonic::Response::into_inner) {
            Ok(wire::ConditionResponse { met: true, detail }) => format!("met: {detail}"),
            Ok(wire::ConditionResponse { met: false, detail }) => format!("not met: {detail}"),
            Err(status) => format!("not evaluated: {}", refusal(client, status)?),
        };
        writeln!(text, "{}: {result}", condition.name)?;
    }
    Ok(text)
}

/// Returns the files of the node's state.
async fn state(client: &mut Client, mut room: usize) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let parts = client.service.state(wire::StateRequest {}).await;
    let mut parts = parts.map_err(|status| client.explain(status))?.into_inner();
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    while let Some(part) = parts.message().await.map_err(|status| client.explain(status))? {
        // A file of its own has a header, even without content.
        let bytes = part.content.len() + HEADER_BYTES;
        room = room.checked_sub(bytes).with_context(|| full(&part.name))?;
        match files.last_mut() {
            Some((newest, content)) if *newest == part.name => {
                content.extend(part.content);
            }
            _ => files.push((part.name, part.content)),
        }
    }
    Ok(files)
}

/// Returns the reason for which the service refused a call. A call that the service did not answer is an error.
fn refusal(client: &Client, status: Status) -> anyhow::Result<String> {
    if status.source().is_some() { Err(client.explain(status)) } else { Ok(status.message().to_owned()) }
}

fn full(name: &str) -> String {
    format!("the archive would be larger than {} MiB with {name}", MAX_BYTES >> 20)
}

/// An archive whose files have no secrets.
struct Archive {
    tar: tar::Builder<Vec<u8>>,
    time: u64,
}

impl Archive {
    /// Returns the bytes that may be added.
    fn room(&self) -> usize {
        MAX_BYTES.saturating_sub(self.tar.get_ref().len() + HEADER_BYTES)
    }

    /// Adds a file. A name that leads out of the directory of the archive is an error.
    fn add(&mut self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let is_inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(is_inside, "add {name:?} to the archive: the name leads out of it");
        ensure!(content.len() <= self.room(), "{}", full(name));
        // The text is redacted before it is escaped: an escape character could hide the form of a secret.
        let content = escape_lines(Redactor::text(&String::from_utf8_lossy(content)).as_bytes());
        ensure!(content.len() <= self.room(), "{}", full(name));
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o600);
        header.set_mtime(self.time);
        header.set_size(content.len() as u64);
        self.tar
            .append_data(&mut header, format!("node-debug/{name}"), content.as_bytes())
            .with_context(|| format!("add {name} to the archive"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another program in the place of the service may send names with `..`.
    #[test]
    fn file_names_stay_inside_the_archive() {
        let mut archive = Archive { tar: tar::Builder::new(Vec::new()), time: 0 };
        archive.add("logs/kubelet.log", b"").unwrap();
        for name in ["logs/../../etc/passwd".to_owned(), format!("logs/{}/../../../x", "x".repeat(100))] {
            assert!(archive.add(&name, b"").is_err(), "{name}");
        }
    }

    /// Escaped control characters are longer.
    #[test]
    fn size_of_archive_is_limited() {
        let nearly_full = vec![0; MAX_BYTES - 2 * HEADER_BYTES];
        let mut archive = Archive { tar: tar::Builder::new(nearly_full), time: 0 };
        for content in [b"a\n".repeat(HEADER_BYTES), b"\x07".repeat(HEADER_BYTES / 2)] {
            let error = archive.add("a", &content).unwrap_err().to_string();
            assert_eq!(error, "the archive would be larger than 256 MiB with a");
        }
        archive.add("a", b"a\n").unwrap();
    }
}
