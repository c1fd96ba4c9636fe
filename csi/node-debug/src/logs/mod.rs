//! The logs of the node's components. The service keeps no copy: each call reads the file of the component, or the kernel's
//! buffer.

mod file;
mod kernel;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

pub(crate) use file::CHUNK_BYTES;
use file::{FileReader, MAX_BYTES};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use kernel::KernelReader;
use service::absolute_path;
use tokio::sync::OwnedSemaphorePermit;

use crate::disk;

/// What stands in place of older bytes. A line without its beginning could show the value of a secret without its name.
const OLDER: &str = "[node-debug: older lines are left out here]\n";

/// The interval at which a call that follows looks for more. An event would need a watch on each directory above the file and above the
/// target of a link, and a reader does not notice the difference.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Where the lines of a component are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineSource {
    /// A file that the component appends to. It may be rotated, truncated, and not exist yet.
    File(PathBuf),
    /// The kernel's log.
    Kmsg,
}

impl fmt::Display for LineSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Kmsg => f.write_str("kmsg"),
        }
    }
}

/// A component and the source of its lines: `NAME=SOURCE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSource {
    /// The name of the component.
    pub name: String,
    /// Where its lines are.
    pub source: LineSource,
}

impl FromStr for LogSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, source) = text.split_once('=').ok_or("must be NAME=SOURCE")?;
        // The name becomes the name of a file in the archive of `dbg bundle`.
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(is_name) {
            return Err("the name must be letters, digits, dots, hyphens or underscores, and begin with a letter or digit".to_owned());
        }
        let source = match source {
            "kmsg" | "/dev/kmsg" => LineSource::Kmsg,
            path => absolute_path(path)
                .map(LineSource::File)
                .map_err(|error| format!("the source {error}, or kmsg"))?,
        };
        Ok(Self { name: name.to_owned(), source })
    }
}

/// Returns the newest lines of a log, and with `follow` what the component appends from then on, until the stream is dropped. The permit is
/// held for as long, and for as long as a read hangs.
pub(crate) fn read(
    source: &LineSource,
    lines: Option<u64>,
    follow: bool,
    permit: OwnedSemaphorePermit,
) -> BoxStream<'static, anyhow::Result<Vec<u8>>> {
    let position = match source {
        LineSource::File(path) => Position::File(FileReader::new(path.clone(), follow)),
        LineSource::Kmsg => Position::Kernel(KernelReader::default()),
    };
    let reader = Reader { position, follow, _permit: permit };
    let content = async move {
        let (reader, content) = newest(reader, lines).await?;
        let chunks: Vec<_> = content.chunks(CHUNK_BYTES).map(|chunk| Ok(chunk.to_vec())).collect();
        anyhow::Ok(stream::iter(chunks).chain(stream::try_unfold(reader, appended)))
    };
    stream::once(content).try_flatten().boxed()
}

/// Reads to the present end of a log. Returns its last lines.
async fn newest(mut reader: Reader, lines: Option<u64>) -> anyhow::Result<(Reader, Vec<u8>)> {
    let mut content = Vec::new();
    let (mut bytes, mut is_end) = (0, false);
    while !is_end {
        let (same, chunk) = reader.next().await?;
        reader = same;
        bytes += chunk.len();
        // A component, or the kernel, may append faster than its log is read. The newest bytes of a file were its last ones when it was
        // opened, and a part of the kernel's log is shorter if there is no more at present.
        is_end = match &reader.position {
            Position::File(_) => chunk.is_empty() || bytes > MAX_BYTES,
            Position::Kernel(_) => chunk.len() < CHUNK_BYTES,
        };
        content.extend(chunk);
        content.drain(..content.len().saturating_sub(MAX_BYTES + 1));
    }
    let begins_within = matches!(&reader.position, Position::File(file) if file.begins_within);
    if begins_within || content.len() > MAX_BYTES {
        content.splice(..start_of_newest(&content, MAX_BYTES), OLDER.bytes());
    }
    if let Some(lines) = lines {
        content.drain(..start_of_last(&content, lines));
    }
    Ok((reader, content))
}

/// Waits until a log has more, if the call follows it.
async fn appended(mut reader: Reader) -> anyhow::Result<Option<(Vec<u8>, Reader)>> {
    while reader.follow {
        let (same, chunk) = reader.next().await?;
        if !chunk.is_empty() {
            return Ok(Some((chunk, same)));
        }
        reader = same;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(None)
}

/// Returns where the newest whole lines begin that have at most `max_bytes`, of a log that may begin within a line.
fn start_of_newest(content: &[u8], max_bytes: usize) -> usize {
    let before = content.len().saturating_sub(max_bytes + 1);
    let newline = content[before..].iter().position(|byte| *byte == b'\n');
    newline.map_or(content.len(), |newline| before + newline + 1)
}

/// Returns where the last `lines` lines begin.
fn start_of_last(content: &[u8], lines: u64) -> usize {
    let Some(others) = usize::try_from(lines).unwrap_or(usize::MAX).checked_sub(1) else {
        return content.len();
    };
    let ends = content.strip_suffix(b"\n").unwrap_or(content).iter().enumerate().rev();
    ends.filter(|(_, byte)| **byte == b'\n').nth(others).map_or(0, |(at, _)| at + 1)
}

/// A call that reads a log.
#[derive(Debug)]
struct Reader {
    position: Position,
    follow: bool,
    _permit: OwnedSemaphorePermit,
}

/// The position of a call in a log.
#[derive(Debug)]
enum Position {
    File(FileReader),
    Kernel(KernelReader),
}

impl Reader {
    /// Returns what the log has after the position; nothing at its end.
    async fn next(mut self) -> anyhow::Result<(Self, Vec<u8>)> {
        let read = move || {
            let content = match &mut self.position {
                Position::File(reader) => reader.next(),
                Position::Kernel(reader) => reader.next(),
            };
            content.map(|content| (self, content))
        };
        disk::in_time(read).await
    }
}

#[cfg(test)]
mod tests;
