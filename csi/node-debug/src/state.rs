//! The state of the node for a bug report, as text files.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use futures::stream::{FuturesOrdered, Stream};
use loopfs::loop_device::unmanaged;
use loopfs::project_quota::{ProjectId, ProjectQuota};

use crate::disk::Disk;

/// All projects that can have a quota.
const FIRST_PROJECT: ProjectId = ProjectId::new(1).unwrap();
const LAST_PROJECT: ProjectId = ProjectId::new(u32::MAX - 1).unwrap();

/// A file of the report.
#[derive(Debug)]
pub(crate) struct StateFile {
    pub(crate) name: &'static str,
    pub(crate) content: Vec<u8>,
}

/// Returns the content of a file of the report. The data directory may be unknown.
type Part = fn(Option<&Path>) -> anyhow::Result<Vec<u8>>;

const PARTS: [(&str, Part); 4] = [
    ("versions.txt", |_| Ok(versions().into_bytes())),
    ("mountinfo.txt", |_| fs::read("/proc/self/mountinfo").context("read /proc/self/mountinfo")),
    ("loop-devices.txt", |_| Ok(loop_devices()?.into_bytes())),
    ("quotas.txt", |data_dir| {
        Ok(quotas(data_dir.context("node-debug was started without --data-dir")?)?.into_bytes())
    }),
];

/// The state of a node. Each part may block, and has its own limit of reads.
#[derive(Debug)]
pub(crate) struct State {
    data_dir: Option<PathBuf>,
    disks: [Disk; PARTS.len()],
}

impl State {
    pub(crate) fn new(data_dir: Option<PathBuf>) -> Self {
        Self { data_dir, disks: Default::default() }
    }

    /// Reads the parts concurrently. One that cannot be read has the reason as its content.
    pub(crate) fn read(&self) -> impl Stream<Item = StateFile> + use<> {
        let reads = PARTS.into_iter().zip(self.disks.clone()).map(|((name, part), disk)| {
            let data_dir = self.data_dir.clone();
            async move {
                let content = disk.read(move || part(data_dir.as_deref())).await;
                let content =
                    content.unwrap_or_else(|error| format!("could not be read: {error:#}\n").into_bytes());
                StateFile { name, content }
            }
        });
        reads.collect::<FuturesOrdered<_>>()
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

fn quotas(data_dir: &Path) -> anyhow::Result<String> {
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

    use futures::stream::StreamExt;
    use nix::sys::stat::Mode;

    use super::*;
    use crate::disk::{MAX_READS, READ_TIMEOUT};

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
        let state = State::new(Some(data_dir.clone()));
        for read_number in 0..=MAX_READS {
            let mut files = pin!(state.read());
            for name in ["versions.txt", "mountinfo.txt", "loop-devices.txt"] {
                let (found, content) = text(files.next().await);
                assert!(found == name && !content.contains("no result"), "{found}: {content}");
                assert!(name != "mountinfo.txt" || content.contains(" /proc "), "{content}");
            }
            let reason = if read_number < MAX_READS {
                assert!(futures::poll!(files.next()).is_pending());
                tokio::time::advance(READ_TIMEOUT).await;
                "no result within 15s"
            } else {
                "4 reads of the disk have not ended"
            };
            let (name, content) = text(files.next().await);
            assert!(name == "quotas.txt" && content.contains(reason), "{content}");
        }
        // The threads end when the pipe has a writer, also those that have not opened it yet.
        std::mem::forget(OpenOptions::new().read(true).write(true).open(data_dir).unwrap());
    }
}
