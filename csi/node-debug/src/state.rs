//! The state of the node for a bug report, as text files.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::stream::{self, Stream, StreamExt};
use loopfs::loop_device::unmanaged;
use loopfs::project_quota::{ProjectId, ProjectQuota};
use tokio::sync::Semaphore;

/// The longest time for one part.
const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// Reads of one part that may run concurrently. A read of a disk that hangs never ends.
const MAX_READS: usize = 4;

/// All projects that can have a quota.
const FIRST_PROJECT: ProjectId = ProjectId::new(1).unwrap();
const LAST_PROJECT: ProjectId = ProjectId::new(u32::MAX - 1).unwrap();

/// A file of the report.
#[derive(Debug)]
pub(crate) struct StateFile {
    pub(crate) name: &'static str,
    pub(crate) content: Vec<u8>,
}

/// A part of the state.
#[derive(Clone, Copy, Debug)]
struct Part {
    name: &'static str,
    read: fn(Option<&Path>) -> anyhow::Result<Vec<u8>>,
}

const PARTS: [Part; 4] = [
    Part { name: "versions.txt", read: |_| Ok(versions().into_bytes()) },
    Part {
        name: "mountinfo.txt",
        read: |_| fs::read("/proc/self/mountinfo").context("read /proc/self/mountinfo"),
    },
    Part { name: "loop-devices.txt", read: |_| loop_devices().map(String::into_bytes) },
    Part { name: "quotas.txt", read: |data_dir| quotas(data_dir).map(String::into_bytes) },
];

/// Reads the state of the node.
#[derive(Clone, Debug)]
pub(crate) struct StateReader {
    data_dir: Option<PathBuf>,
    /// For each part, the reads that may run. A part that hangs does not use up those of the others.
    reads: [Arc<Semaphore>; PARTS.len()],
}

impl StateReader {
    pub(crate) fn new(data_dir: Option<PathBuf>) -> Self {
        Self { data_dir, reads: PARTS.map(|_| Arc::new(Semaphore::new(MAX_READS))) }
    }

    /// Reads all parts concurrently. A part that cannot be read, or not in time, has the reason as its content.
    pub(crate) fn read(&self) -> impl Stream<Item = StateFile> + use<> {
        let parts: Vec<_> = PARTS
            .into_iter()
            .zip(&self.reads)
            .map(|(part, reads)| part.read(self.data_dir.clone(), Arc::clone(reads)))
            .collect();
        stream::iter(parts).buffered(PARTS.len())
    }
}

impl Part {
    async fn read(self, data_dir: Option<PathBuf>, reads: Arc<Semaphore>) -> StateFile {
        let content = self.content(data_dir, reads).await;
        let content = content.unwrap_or_else(|error| format!("could not be read: {error:#}\n").into_bytes());
        StateFile { name: self.name, content }
    }

    async fn content(self, data_dir: Option<PathBuf>, reads: Arc<Semaphore>) -> anyhow::Result<Vec<u8>> {
        let Ok(permit) = reads.try_acquire_owned() else {
            bail!("{MAX_READS} reads have not ended; the disk may hang");
        };
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            (self.read)(data_dir.as_deref())
        });
        match tokio::time::timeout(READ_TIMEOUT, reading).await {
            Ok(read) => read?,
            Err(_elapsed) => bail!("no result within {READ_TIMEOUT:?}; the disk may hang"),
        }
    }
}

fn versions() -> String {
    let mut text = format!("node-debug {}\n", env!("CARGO_PKG_VERSION"));
    for path in ["/proc/version", "/etc/os-release", "/proc/uptime", "/proc/loadavg", "/proc/meminfo"] {
        match fs::read_to_string(path) {
            Ok(content) => text += &format!("\n# {path}\n{content}"),
            Err(error) => text += &format!("\n# {path}: {error}\n"),
        }
    }
    text
}

fn loop_devices() -> anyhow::Result<String> {
    let mut text = "# device, backing file, offset, size limit, flags\n".to_owned();
    for index in unmanaged::bound_indices()? {
        let device = unmanaged::attributes(index);
        // A device that was detached since it was listed.
        let Some(path) = &device.backing_path else { continue };
        let flags = [
            ("read-only", device.read_only),
            ("direct-io", device.direct_io),
            ("autoclear", device.auto_clear),
            ("partition-scan", device.partition_scan),
        ];
        let flags: Vec<&str> =
            flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect();
        writeln!(
            text,
            "/dev/loop{index}\t{path:?}\t{}\t{}\t{}",
            device.offset.unwrap_or(0),
            device.size_limit.unwrap_or(0),
            flags.join(",")
        )?;
    }
    Ok(text)
}

fn quotas(data_dir: Option<&Path>) -> anyhow::Result<String> {
    let data_dir = data_dir.context("node-debug was started without --data-dir")?;
    let directory = File::open(data_dir).with_context(|| format!("open {}", data_dir.display()))?;
    let quota = ProjectQuota::of(directory.as_fd());
    let mut text =
        format!("# {}: {:?}\n# project, usage and limits\n", data_dir.display(), quota.enforcement()?);
    for usage in quota.ids(FIRST_PROJECT..=LAST_PROJECT) {
        writeln!(text, "{:?}", usage?)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::pin::pin;

    use nix::sys::stat::Mode;

    use super::*;

    fn text(file: Option<StateFile>) -> (&'static str, String) {
        let file = file.unwrap();
        (file.name, String::from_utf8(file.content).unwrap())
    }

    // The clock is paused, so only the test lets time pass.
    /// Its file has the reason, and only a limited number of reads may hang.
    #[tokio::test(start_paused = true)]
    async fn hanging_part_does_not_delay_others() {
        let directory = tempfile::tempdir().unwrap();
        // Opening a named pipe waits for a writer.
        let data_dir = directory.path().join("data");
        nix::unistd::mkfifo(&data_dir, Mode::S_IRWXU).unwrap();
        let reader = StateReader::new(Some(data_dir.clone()));
        for _ in 0..MAX_READS {
            let mut files = pin!(reader.read());
            for name in ["versions.txt", "mountinfo.txt", "loop-devices.txt"] {
                let (found, content) = text(files.next().await);
                assert!(found == name && !content.contains("no result"), "{found}: {content}");
            }
            assert!(futures::poll!(files.next()).is_pending());
            tokio::time::advance(READ_TIMEOUT).await;
            let (name, content) = text(files.next().await);
            assert!(name == "quotas.txt" && content.contains("no result within 15s"), "{content}");
        }
        let files: Vec<StateFile> = reader.read().collect().await;
        let contents: Vec<(&str, String)> = files.into_iter().map(|file| text(Some(file))).collect();
        assert!(contents[1].1.contains(" /proc "), "{contents:?}");
        assert!(contents[3].1.contains("4 reads have not ended"), "{contents:?}");
        // The threads end when the pipe has a writer, also those that have not opened it yet.
        std::mem::forget(OpenOptions::new().read(true).write(true).open(data_dir).unwrap());
    }
}
